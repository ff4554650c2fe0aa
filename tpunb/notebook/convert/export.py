"""Scripts for another machine: their use of tpunb, and the code that replaces it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tpunb.notebook.convert.names import RunCells
from tpunb.notebook.convert.statements import executed
from tpunb.notebook.models import Need, Requirement
from tpunb.notebook.scopes import (
    TPUNB_LAUNCH,
    Scopes,
    Site,
    dotted,
    first_line,
    imported,
    literal,
    packages,
)

TEMPLATES = Path(__file__).parent / "templates" / "header"
STAND_IN = ("log", "track", "save", "load")
"""Functions of tpunb that an exported script replaces if tpunb is not installed."""
_PACKAGES = ("training", "errors", "data")
_WORD = re.compile(r"\b_\w+")


class _Part(NamedTuple):
    """A statement of the templates."""

    names: tuple[str, ...]
    """Names that it defines."""
    source: str
    kind: type[ast.stmt]

    @property
    def is_import(self) -> bool:
        return self.kind in (ast.Import, ast.ImportFrom)

    @property
    def is_definition(self) -> bool:
        return self.kind in (ast.FunctionDef, ast.ClassDef)


def functions(code: str, *, done: bool = False) -> str:
    """Return the source of the functions of `templates/header` that code uses, and of those that
    these use. `done`: the lines of the cells above the train cell have run in the notebook.
    """
    sources = {name: part.source for part in _parts() for name in part.names}
    wanted: set[str] = set()
    todo = [name for name in _WORD.findall(code) if name in sources]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += [other for other in _WORD.findall(sources[name]) if other in sources]
    kept = list(dict.fromkeys(part for part in _parts() if wanted.intersection(part.names)))
    imports = {part.source for part in kept if part.is_import}
    text = "\n".join(sorted(imports, key=lambda source: (source.split()[1], source)))
    alone = True
    for part in kept:
        if not part.is_import:
            text += ("\n\n\n" if alone or part.is_definition else "\n") + part.source
            alone = part.is_definition
    return text.replace("_TPUNB_DONE = False", "_TPUNB_DONE = True") if done else text


@cache
def _parts() -> list[_Part]:
    """The statements of the templates, in order."""
    parts = []
    for name in ("setup", "stand_in", "prepare"):
        text = (TEMPLATES / f"{name}.py").read_text(encoding="utf-8")
        text = re.sub(r"  # (?:noqa|type:).*", "", text)
        lines = text.split("\n")
        for node in ast.parse(text).body[1:]:  # below the docstring
            source = "\n".join(lines[first_line(node) - 1 : node.end_lineno])
            parts.append(_Part(tuple(_defined(node)), source, type(node)))
    return parts


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    assert isinstance(node, ast.AnnAssign)
    assert isinstance(node.target, ast.Name)
    return [node.target.id]


@dataclass
class Uses:
    """Use of tpunb by the cells."""

    functions: set[str] = field(default_factory=set)
    """Names from `STAND_IN` that they use."""
    beyond: list[Requirement] = field(default_factory=list)
    """Uses for which tpunb itself is needed."""
    launch: bool = False
    """True if `tpunb.launch` is imported by name; its calls have already been replaced."""


def uses_of_tpunb(run: RunCells) -> Uses:
    """Find what the cells use of tpunb."""
    uses = Uses()
    if not any("tpunb" in source for source in run.sources):
        return uses
    scopes = run.scopes
    imports = (pair for site in scopes.imports for pair in imported(site.node))
    # The calls of `from tpunb import launch` have been replaced: only the import is left.
    uses.launch = any(full == TPUNB_LAUNCH and not scopes.loads(name) for name, full in imports)
    for site in (*scopes.imports, *scopes.attributes()):
        for name in _taken(scopes, site):
            if name in STAND_IN or (name == "launch" and uses.launch):
                uses.functions.add(name)
            elif isinstance(site.node, ast.Import | ast.ImportFrom) or name in _PACKAGES:
                need = Requirement(site.cell.number, site.line, Need.TPUNB, f"tpunb.{name}")
                uses.beyond.append(need)
    uses.beyond = list({need.name: need for need in reversed(uses.beyond)}.values())
    return uses


def _taken(scopes: Scopes, site: Site) -> Iterator[str]:
    """Yield the names of tpunb that a node uses: 'log', 'training'."""
    node = site.node
    if isinstance(node, ast.Attribute):
        yield from (node.attr,) if scopes.full(node.value, site.scope) == "tpunb" else ()
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("tpunb."):
                yield alias.name.removeprefix("tpunb.")
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        if node.module == "tpunb":
            yield from (alias.name for alias in node.names)
        elif node.module.startswith("tpunb."):
            yield node.module.removeprefix("tpunb.")


def place_for_preparing(trees: Sequence[ast.Module]) -> tuple[int, int] | None:
    """Return the cell and the line after which the script prepares itself; None: above all cells.

    This is the last setup line before any library other than the standard library is imported:
    setup lines install packages, and set variables that torch_xla reads when it is imported.
    """
    place = None
    for index, tree in enumerate(trees):
        for node in tree.body:
            if is_setup(node):
                place = index, node.end_lineno or node.lineno
            elif any(packages(part) - sys.stdlib_module_names for part in (node, *executed(node))):
                return place
    return place


def is_setup(node: ast.stmt) -> bool:
    """True if a statement at the top level of a cell was a setup line."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(
        "_tpunb_os.environ["
    ):
        return True
    if not isinstance(node, ast.Expr | ast.Assign):
        return False
    call = node.value
    call = call.value if isinstance(call, ast.Subscript) else call
    return isinstance(call, ast.Call) and dotted(call.func).startswith("_tpunb_setup_")


def certain_secrets(run: RunCells) -> list[str]:
    """Return variables that setup lines outside branches and functions read and no cell sets."""
    found = [
        str(literal(site.call.args[0]))
        for site in run.scopes.calls
        if dotted(site.call.func) == "_tpunb_setup_secret"
        and site.frame.function is None
        and site.simple()
    ]
    own = re.compile(
        r"_tpunb_os\.environ\['\w+'\] = (?=_tpunb_setup_secret)|_tpunb_setup_secret\('\w+'"
    )
    code = own.sub("", "\n".join(run.sources))
    return [
        name
        for name in dict.fromkeys(found)
        if not re.search(rf"{name}['\"]?\s*(?:\]\s*=[^=]|=[^=]|,|:)", code)
    ]


def preparation(
    run: RunCells,
    code: str,
    uses: Uses,
    spmd: bool,
    arguments: str,
    *,
    called_below: bool,
    done: bool,
) -> str | None:
    """Return the part of the header that prepares a script; `code` is all code of the script,
    `done` as in `functions`.

    None if the header of a run's script is enough.
    """
    if not any(
        word in code for word in ("_tpunb_setup_", "_tpunb_os.environ", "tpunb", "torch_xla")
    ):
        return None
    lines = ["", "", "def _tpunb_instead():"]
    if uses.beyond:
        first = uses.beyond[0]
        message = f"cell [{first.cell}] needs {first.name}, which this script does not contain: "
        message += "pip install tpunb"
        lines.append(f"    raise ModuleNotFoundError({message!r}, name='tpunb')")
    else:
        if not spmd and "torch_xla" in code:
            lines.append("    _tpunb_launch_here()")
        names = [f"{name}=_tpunb_{name}" for name in STAND_IN if name in uses.functions]
        names += ["launch=None"] if uses.launch else []
        if names or "tpunb" in code:
            lines.append(f"    _tpunb_stand_in({', '.join(names)})")
    if len(lines) == 3:
        lines.append("    pass")
    lines += ["", ""]
    if secrets := certain_secrets(run):
        lines.append(f"_tpunb_setup_secrets({', '.join(map(repr, secrets))})")
    call = prepare_call(arguments)
    lines += [] if called_below else [call]
    tail = "\n".join(lines)
    text = functions(f"{code}\n{tail}\n{call}", done=done)
    start = "" if "_tpunb_setup_" not in code else SEARCH_HERE
    return f"{text}\n{start}{tail.rstrip()}\n"


SEARCH_HERE = """
if "" not in _tpunb_sys.path:
    _tpunb_sys.path.insert(0, "")  # as in a notebook: modules in the working directory
"""


def prepare_call(arguments: str) -> str:
    return f"_tpunb_prepare({', '.join(filter(None, ('_tpunb_instead', arguments)))})"
