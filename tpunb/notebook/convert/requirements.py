"""What an exported script needs of the machine that it was made on: modules, files, magics.

Only what is there now and is named in full is found; what a cell writes or fetches is not needed.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

from tpunb.notebook.convert.names import Piece
from tpunb.notebook.models import LeftOut, Need, Omission, Requirement

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
"""Extensions without which a script is the same."""


def find_requirements(
    cells: Sequence[Piece], omissions: Sequence[Omission], folders: Sequence[str]
) -> list[Requirement]:
    """Local modules and files that the cells need, and magics whose effect is missing.

    `folders` are those that the notebook's own paths may start from.
    """
    trees = [(cell.number, ast.parse(cell.source)) for cell in cells]
    here = _Here(list(folders), _constants([tree for _, tree in trees]))
    for _, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                here.note_writing(node)
    found = [need for number, tree in trees for need in _needs(number, tree, here)]
    for omission in omissions:
        words = omission.text.split()
        unknown = omission.reason is LeftOut.UNKNOWN_MAGIC
        loads = words[0].lstrip("%") in ("load_ext", "reload_ext") and len(words) > 1
        if omission.cell is not None and (
            unknown or (loads and not _DISPLAY_ONLY.fullmatch(words[1]))
        ):
            name = " ".join(words[: 2 if loads else 1])
            found.append(Requirement(omission.cell, omission.line, Need.MAGIC, name))
    first = {(each.need, each.name): each for each in reversed(found)}
    return sorted(first.values(), key=found.index)


def _needs(number: int, tree: ast.Module, here: _Here) -> Iterator[Requirement]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [] if node.level or not node.module else [node.module]
            for name in names:
                if here.is_local_module(name.partition(".")[0]):
                    yield Requirement(number, node.lineno, Need.MODULE, name)
        elif isinstance(node, ast.Call):
            for path in here.paths_read(node):
                if here.is_local_file(path):
                    yield Requirement(number, node.lineno, Need.FILE, path)


def _constants(trees: Sequence[ast.Module]) -> dict[str, ast.expr]:
    """Names that are assigned once, at the top of a cell, and their values."""
    values: dict[str, ast.expr] = {}
    again: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            again |= {node.id} & values.keys()
            values.setdefault(node.id, node)
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                values[target.id] = node.value
    return {name: value for name, value in values.items() if name not in again}


@dataclass
class _Here:
    """The folders of this machine that a notebook's paths start from, and what its cells make."""

    folders: list[str]
    constants: dict[str, ast.expr]
    made: list[str] = field(default_factory=list)
    """Paths that cells write, and texts of setup lines."""

    def note_writing(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name == "append" or name == "insert":
            if ast.unparse(node.func).startswith("sys.path."):
                start = self.folders[0] if self.folders else "."
                paths = filter(None, map(self.path, node.args))
                self.folders += [os.path.join(start, path) for path in paths]
        elif name.startswith("_setup_"):
            texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            self.made += [text for text in texts if isinstance(text, str)]
        elif name.startswith(_WRITE) or _opens_for_writing(node) or _downloads(node):
            self.made += self._paths(node)

    def paths_read(self, node: ast.Call) -> list[str]:
        """The paths that a call reads, as they are written."""
        name = _name(node.func)
        if name in ("_setup_install", "_setup_shell", "_setup_output", "_setup_program"):
            parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            texts = [text for text in parts if isinstance(text, str)]
            found = [path for text in texts for path in _OF_COMMANDS.findall(text)]
            return [path for path in found if "".join(self.made).count(path) == 1]
        reads = name.lower().startswith(_READ) or name in _READ_FOLDER or name == "_run_file"
        if not reads or _opens_for_writing(node) or _downloads(node):
            return []
        return [path for path in self._paths(node) if not self._is_made(path)]

    def is_local_file(self, path: str) -> bool:
        full = os.path.expanduser(path)
        if not path.strip("./~") or full.startswith(_SYSTEM):
            return False
        return any(os.path.exists(os.path.join(folder, full)) for folder in self.folders)

    def is_local_module(self, name: str) -> bool:
        known = name in sys.stdlib_module_names or name == "tpunb"
        if known or self._is_made(f"{name}.py") or self._is_made(name):
            return False
        for folder in self.folders:
            path = os.path.join(folder, name)
            if os.path.isfile(f"{path}.py") or os.path.isfile(os.path.join(path, "__init__.py")):
                return True
            if os.path.isdir(path) and any(file.endswith(".py") for file in os.listdir(path)):
                others = [each for each in sys.path if each and each not in self.folders]
                return PathFinder.find_spec(name, others) is None
        return False

    def path(self, node: ast.expr) -> str | None:
        """The path that an expression is, where it is written out."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            value = self.constants.get(node.id)
            return None if value is None or isinstance(value, ast.Name) else self.path(value)
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call) and _name(node.func) in ("Path", "PurePath", "join"):
            parts = node.args
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = [node.left, node.right]
        known = [self.path(part) for part in parts]
        texts = [text for text in known if text is not None]
        return os.path.join(*texts) if texts and len(texts) == len(known) else None

    def _paths(self, node: ast.Call) -> list[str]:
        """Of the object whose method is called, and of the arguments."""
        places = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        places += [*node.args, *(keyword.value for keyword in node.keywords)]
        return [path for place in places if (path := self.path(place))]

    def _is_made(self, path: str) -> bool:
        """Whether a cell writes it, or a setup line names it."""
        name = os.path.basename(path.rstrip("/"))
        whole = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        return any(whole.search(text) for text in self.made)


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _opens_for_writing(node: ast.Call) -> bool:
    if _name(node.func) != "open":
        return False
    modes = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    return any(re.fullmatch(r"[rwaxbt+]*[wax][rwaxbt+]*", str(text)) for text in texts)


def _downloads(node: ast.Call) -> bool:
    return any(word.arg == "download" for word in node.keywords)
