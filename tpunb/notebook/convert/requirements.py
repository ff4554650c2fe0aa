"""Find what an exported script needs from the machine that made it: modules, files, magics.

Only items that exist now and are named in full are found; files that a cell writes or downloads
are not needed.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

from tpunb.notebook.convert.names import RunCells
from tpunb.notebook.models import LeftOut, Need, Omission, Requirement
from tpunb.notebook.scopes import Scopes, argument, dotted, last_part, literal

_READ = ("read", "load", "open", "imread", "from_file", "fromfile", "genfromtxt", "memmap")
_READ_FOLDER = ("ImageFolder", "DatasetFolder", "listdir", "scandir", "iterdir", "glob", "walk")
_WRITE = (
    *("write", "save", "to_", "dump", "mkdir", "makedirs", "touch", "urlretrieve", "download"),
    *("extract", "unpack", "unlink", "remove", "rmtree", "copy", "move", "rename"),
)
_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr")
_OF_COMMANDS = re.compile(
    r"(?:\s-r\s*|--requirement[ =]|(?:^|[;&|]\s*)(?:python[\d.]*|bash|sh|source)\s+)"
    r"([\w./~-]+\.\w+)"
)
_DISPLAY_ONLY = re.compile(
    r"tpunb\b.*|autoreload|tensorboard|google\.colab\..*|IPython\..*|rich|\w*black\w*|watermark"
    r"|line_profiler|memory_profiler|pycodestyle_magic|jupyter_ai.*|ruff.*"
)
"""Extensions that make no difference to a script."""


def find_requirements(
    run: RunCells, omissions: Sequence[Omission], folders: Sequence[str]
) -> list[Requirement]:
    """Return local modules and files that the cells need, and magics whose effect is missing.

    `folders` are the folders from which the notebook's relative paths may start.
    """
    scopes = run.scopes
    machine = _Machine(list(folders), _constants(scopes))
    for site in scopes.calls:
        machine.note_writing(site.call)
    sites = sorted((*scopes.imports, *scopes.calls), key=lambda site: site.place)
    found = [
        Requirement(site.cell.number, site.line, need, name)
        for site in sites
        for need, name in machine.needs(site.node)
    ]
    for omission in omissions:
        name, *arguments = omission.text.split()
        loads = name.lstrip("%") in ("load_ext", "reload_ext") and arguments
        matters = omission.reason is LeftOut.UNKNOWN_MAGIC
        if loads:
            matters |= not _DISPLAY_ONLY.fullmatch(arguments[0])
            name += f" {arguments[0]}"
        if omission.cell is not None and matters:
            found.append(Requirement(omission.cell, omission.line, Need.MAGIC, name))
    first = {(each.need, each.name): each for each in reversed(found)}
    return sorted(first.values(), key=found.index)


def _constants(scopes: Scopes) -> dict[str, ast.expr]:
    """Return names that are assigned only once, at the top level of a cell, and their values."""
    values: dict[str, ast.expr] = {}
    for site in scopes.assigns:
        if isinstance(site.node, ast.Assign) and site.frame.parent is None:
            name = dotted(site.node.targets[0])
            if len(site.node.targets) == len(scopes.globals.bindings.get(name, ())) == 1:
                values[name] = site.node.value
    return values


@dataclass
class _Machine:
    """Folders of this machine from which relative paths start, and files that the cells make."""

    folders: list[str]
    constants: dict[str, ast.expr]
    made: list[str] = field(default_factory=list)
    """Paths that cells write, and texts of setup lines."""

    def note_writing(self, node: ast.Call) -> None:
        name = last_part(node.func)
        if name == "append" or name == "insert":
            if ast.unparse(node.func).startswith("sys.path."):
                start = self.folders[0] if self.folders else "."
                paths = filter(None, map(self._path, node.args))
                self.folders += [os.path.join(start, path) for path in paths]
        elif name.startswith("_tpunb_setup_"):
            self.made += _texts(node)
        elif name.startswith(_WRITE) or _makes_files(node):
            self.made += self._paths(node)

    def needs(self, node: ast.AST) -> list[tuple[Need, str]]:
        """Return what an import or a call needs of this machine."""
        if isinstance(node, ast.Call):
            return [(Need.FILE, path) for path in self._paths_read(node) if self._is_file(path)]
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        return [(Need.MODULE, name) for name in names if self._is_module(name.partition(".")[0])]

    def _paths_read(self, node: ast.Call) -> list[str]:
        """Return the paths that a call reads, as written in the code."""
        name = last_part(node.func)
        if name in ("_tpunb_setup_install", "_tpunb_setup_shell", "_tpunb_setup_output"):
            found = [path for text in _texts(node) for path in _OF_COMMANDS.findall(text)]
            return [path for path in found if "".join(self.made).count(path) == 1]
        reads = name.lower().startswith(_READ) or name in _READ_FOLDER or name == "_tpunb_run_file"
        if not reads or _makes_files(node):
            return []
        return [path for path in self._paths(node) if not self._is_made(path)]

    def _is_file(self, path: str) -> bool:
        full = os.path.expanduser(path)
        if not path.strip("./~") or full.startswith(_SYSTEM):
            return False
        return any(os.path.exists(os.path.join(folder, full)) for folder in self.folders)

    def _is_module(self, name: str) -> bool:
        known = name in sys.stdlib_module_names or name == "tpunb"
        if known or self._is_made(f"{name}.py") or self._is_made(name):
            return False
        spec = PathFinder.find_spec(name, self.folders)
        if spec is None or spec.loader is not None:
            return spec is not None
        # A folder without __init__.py, which an installed module of that name precedes.
        others = [each for each in sys.path if each and each not in self.folders]
        return PathFinder.find_spec(name, others) is None

    def _path(self, node: ast.expr) -> str | None:
        """Return the path that an expression evaluates to, if that is known from the code."""
        if isinstance(node, ast.Name):
            node = self.constants.get(node.id, node)
        if isinstance(text := literal(node), str):
            return text
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call) and last_part(node.func) in ("Path", "PurePath", "join"):
            parts = node.args
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.left, node.right]
        known = [self._path(part) for part in parts]
        texts = [text for text in known if text is not None]
        return os.path.join(*texts) if texts and len(texts) == len(known) else None

    def _paths(self, node: ast.Call) -> list[str]:
        """Return the paths in a call's arguments and in the object whose method is called."""
        places = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        places += [*node.args, *(keyword.value for keyword in node.keywords)]
        return [path for place in places if (path := self._path(place))]

    def _is_made(self, path: str) -> bool:
        """True if a cell writes the path, or a setup line mentions it."""
        name = os.path.basename(path.rstrip("/"))
        whole = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        return any(whole.search(text) for text in self.made)


def _texts(node: ast.Call) -> list[str]:
    return [part for part in map(literal, ast.walk(node)) if isinstance(part, str)]


def _makes_files(node: ast.Call) -> bool:
    if last_part(node.func) != "open":
        return argument(node, "download") is not None
    modes = [str(literal(mode)) for mode in (*node.args, argument(node, "mode"))]
    return any(re.fullmatch(r"[rwaxbt+]*[wax][rwaxbt+]*", mode) for mode in modes)
