"""Check before a run for names that its cells need but cannot have.

A run has the names that its cells define. It does not have the notebook's history (`_`, `Out[3]`),
the values that the user chose in a widget, or names that only left-out cells define. Only certain
failures are refused; others are reported when the run reaches them.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tpunb.notebook.convert.cells import LostName, parse_body
from tpunb.notebook.convert.earlier_values import train_line
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import Absent, EarlierValues, LeftOut
from tpunb.notebook.scopes import (
    CONSTRUCTORS,
    KNOWN,
    DefinedFunction,
    FunctionOrClass,
    ParsedCell,
    Scopes,
    Site,
    bound_names,
    dotted,
    first_name,
    imported,
    mentions,
    scopes_of,
    words,
)

_HISTORY = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|In|Out|_ih|_oh|_dh")
_UNSEEN = re.compile(
    r"\bimport\s+\*|\b_tpunb_run_(file|module)\("
    r"|\b(exec|globals|locals|vars|builtins|__builtins__|__dict__)\b"
)
"""Code that may define names in ways that static analysis cannot see."""


class LeftOutCell(NamedTuple):
    """A cell of the notebook that is not part of the run."""

    place: int
    """Its index in the snapshot; if it is not in the snapshot, that of the cell below it."""
    label: str
    """'cell [3]'."""
    reason: LeftOut
    source: str
    got: EarlierValues = EarlierValues()
    """For a train cell: the values that the kernel has from it."""


class RunCell(NamedTuple):
    """A cell of the run in plain Python."""

    number: int
    source: str
    place: int = 0
    """The cell's index in the snapshot."""


class RunCells:
    """The cells of a run, in order, which are read when a check first needs it."""

    def __init__(self, cells: Sequence[RunCell]) -> None:
        self.cells = cells
        self.sources = [cell.source for cell in cells]

    @cached_property
    def scopes(self) -> Scopes:
        KNOWN.begin()
        return KNOWN.scopes(
            KNOWN.parse(cell.source, cell.place, cell.number, cell.source.split("\n"))
            for cell in self.cells
        )


@dataclass(frozen=True)
class MissingName:
    """Where a name is defined in the notebook, and how to make it available to the run."""

    where: str
    """'cell [3]', or '`%%capture out` in cell [3]'."""
    why: str
    """Why this place is not part of the run."""
    instead: str
    """What to do."""


def refuse_missing(
    run: RunCells, missing: Mapping[str, MissingName], held: Container[str] = ()
) -> None:
    """Raise ConversionError, with cell and line, for the first name that a run cannot have.

    `missing` are names that are defined elsewhere; `held` are names that the run gets from the
    kernel.
    """
    every = set().union(*map(words, run.sources))
    if defines_unseen(run.sources):
        missing = {}
    history = (name for name in every if name[0] in "_IO" and _HISTORY.fullmatch(name))
    wanted = {*history, *(every & missing.keys())}
    wanted -= set(dir(builtins))
    # Most cells with such a word only bind it (`for _ in range(3)`) or have it in a string.
    if "ipywidgets" not in every and not (wanted and any(map(run.scopes.loads, wanted))):
        return
    scopes = run.scopes
    chosen = chosen_widgets(scopes) if "ipywidgets" in every else {}
    everywhere = set().union(*map(scopes.bound, scopes.cells))
    before: set[str] = set()
    for cell in scopes.cells:
        before |= scopes.bound(cell)
        for site in _certain_reads(scopes, cell, wanted | chosen.keys()):
            # A function may need a name that a cell below its own defines.
            known = before if site.cell is cell else everywhere
            reason, node = None, site.node
            if isinstance(node, ast.Attribute):
                reason = _choice(node, chosen)
            elif isinstance(node, ast.Name) and node.id in wanted - known:
                reason = None if node.id in held else _reason(node.id, missing)
            if reason is not None:
                line = site.cell.lines[site.line - 1]
                raise ConversionError(reason, site.cell.number, site.line, line)


def defines_unseen(sources: Sequence[str]) -> bool:
    """True if cells may define names in ways that static analysis cannot see."""
    return any(mentions(_UNSEEN, source) for source in sources)


def _certain_reads(scopes: Scopes, cell: ParsedCell, names: Collection[str]) -> Iterator[Site]:
    """Yield the global names that a cell certainly reads, with attributes of these names, in
    source order; then those that functions read whose names it reads, and so on.

    Bodies of loops are assumed to run, and functions that are mentioned to be called.
    """
    entered: set[str] = set()
    todo: list[ParsedCell | DefinedFunction] = [cell]
    while todo:
        for site in scopes.reads(todo.pop(0)):
            if not site.fails():
                continue
            name = first_name(site.node)
            if name in names:
                yield site
            if name not in entered:
                entered.add(name)
                todo += _run_by(scopes, name)


def _run_by(scopes: Scopes, name: str) -> list[DefinedFunction]:
    """The function with a name at the top level of a cell, or what makes an object of that class;
    of several with the name, the last.
    """
    bindings = scopes.globals.bindings.get(name, ())
    defined = [one.node for one in bindings if isinstance(one.frame.node, ast.Module)]
    last = next((node for node in reversed(defined) if isinstance(node, FunctionOrClass)), None)
    if isinstance(last, ast.ClassDef):
        makers = (f for maker in CONSTRUCTORS for f in scopes.by_name.get(maker, ()))
        return [f for f in makers if f.outer.node is last]
    return [f for f in scopes.by_name.get(name, ()) if f.node is last]


def _choice(node: ast.Attribute, chosen: Mapping[str, str]) -> str | None:
    """Why a run cannot have an attribute of a widget; None for other attributes."""
    whose = node.value.id if isinstance(node.value, ast.Name) else ""
    if whose not in chosen or node.attr not in WIDGET_VALUES:
        return None
    return (
        f"`{whose}.{node.attr}` is a value chosen in the notebook, and a run has a new "
        f"{chosen[whose]} with its initial value: assign the value itself, or put it "
        "into os.environ in a cell tagged tpu-skip, since a run has the kernel's "
        "environment"
    )


def _reason(name: str, missing: Mapping[str, MissingName]) -> str:
    if name in missing:
        maker = missing[name]
        return f"`{name}` is defined only in {maker.where}, {maker.why}: {maker.instead}"
    return (
        f"`{name}` is the notebook's own history of executed cells, which a run does not have: "
        "give the value a name in the cell that makes it, and use that name"
    )


WIDGET_VALUES = ("value", "result", "kwargs", "index", "label", "selected_index")
"""Attributes of widgets that contain the chosen value."""

_ONLY_SHOW = (
    *("IntProgress", "FloatProgress", "HTML", "HTMLMath", "Label", "Image", "Video", "Audio"),
    *("Output", "Valid", "Box", "HBox", "VBox", "GridBox", "Layout"),
)


def chosen_widgets(scopes: Scopes) -> dict[str, str]:
    """Return the names and classes of ipywidgets (7.7 to 8.1) whose values the user chooses.

    Widgets that several cells make, and those whose values the cells set, are excluded.
    """
    widgets: dict[str, str] = {}
    for site in scopes.assigns:
        if isinstance(site.node, ast.Assign) and isinstance(site.node.value, ast.Call):
            package, _, kind = scopes.full(site.node.value.func, site.scope).rpartition(".")
            if package in ("ipywidgets", "ipywidgets.widgets") and kind not in _ONLY_SHOW:
                targets = [target for target in site.node.targets if isinstance(target, ast.Name)]
                widgets |= {target.id: kind for target in targets}
    for site in scopes.attributes(*WIDGET_VALUES):
        if isinstance(site.node, ast.Attribute) and isinstance(site.node.ctx, ast.Store):
            widgets.pop(dotted(site.node.value), None)
    makers = Counter(name for cell in scopes.cells for name in scopes.bound(cell))
    return {name: kind for name, kind in widgets.items() if makers[name] == 1}


_NOTHING = {
    LeftOut.NEVER_RAN: "a train cell that never ran in this kernel",
    LeftOut.FAILED: "a train cell that failed",
    LeftOut.TRAIN_CELL: "a train cell that has not returned it in this kernel",
}
"""Why a train cell has returned nothing."""
_INSTEAD = {
    LeftOut.NEVER_RAN: "run that cell, then the train cell again",
    LeftOut.FAILED: "fix that cell and run it, then the train cell again",
    LeftOut.DELETED: "put that cell back",
    LeftOut.BELOW: "move that cell above the train cell",
    LeftOut.LAUNCH: "pass what you need from it to the function, as in "
    "tpunb.launch(fn, args=(value,)), or save it there and load it here",
    LeftOut.BELOW_LAUNCH: "define it above that statement, or pass it to the function, as in "
    "tpunb.launch(fn, args=(value,))",
    LeftOut.DEBUG_CELL: "define it in a cell above, without %%tpu_debug",
}
_MARKED = "define it in a cell that is part of runs"
_LOST = "define it in plain Python"
_OR = ", or tag the cells that need it tpu-skip if runs can do without them"


def missing_names(
    left_out: Iterable[LeftOutCell], lost: Iterable[tuple[int, LostName]]
) -> dict[str, MissingName]:
    """Return the names that only left-out cells and lines define, with advice for each.

    `lost` are names of left-out lines, with the numbers of their cells.
    """
    missing: dict[str, MissingName] = {}
    for number, (line, name, maker) in lost:
        where = f"`{maker}` in cell [{number}], line {line}"
        missing[name] = MissingName(where, "which a run does not repeat", _LOST + _OR)
    for cell in left_out:
        absent = missing_returns(cell)
        shown = cell.reason in (LeftOut.TRAIN_CELL, LeftOut.BELOW)
        imported = imported_names(cell.source) if shown else set()
        for name in defined_names(cell.source) | absent.keys():
            if cell.reason is LeftOut.BELOW and name in missing:
                continue  # a cell above says more
            why = f"which is left out because {cell.reason}"
            instead = _INSTEAD.get(cell.reason, _MARKED)
            if name in imported:
                if cell.reason is LeftOut.TRAIN_CELL:
                    why = "a train cell, whose imports stay in its ranks"
                missing[name] = MissingName(cell.label, why, _IMPORT)
                continue
            if name in absent:
                why, instead = absent[name].why, absent[name].instead
            elif cell.reason in _NOTHING and "tpu_train" in cell_magics(cell.source):
                why = "a train cell that does not return it"
                instead = f"add `--returns {name}` to {cell.label} and run it again"
            missing[name] = MissingName(cell.label, why, instead + _OR)
    return missing


_IMPORT = "import it here too, or in a cell above"
_AGAIN = "run it, then this cell again"


def missing_returns(cell: LeftOutCell) -> dict[str, Absent]:
    """Return values that a train cell should have returned but did not, by name.

    Empty for a cell that is skipped on purpose.
    """
    if cell.reason not in _NOTHING or "tpu_train" not in cell_magics(cell.source):
        return {}
    missing = set(train_line(cell.source).names) - cell.got.names
    return dict.fromkeys(missing, Absent(_NOTHING[cell.reason], _AGAIN)) | dict(cell.got.absent)


def imported_names(source: str) -> set[str]:
    """Return the names that a cell imports outside functions; none if it is invalid."""
    sites = scopes_of(parse_body(source)[0]).imports
    outside = [site.node for site in sites if site.frame.function is None]
    return {name for node in outside for name, _ in imported(node)}


def defined_names(source: str) -> set[str]:
    """Return the names that a cell defines, also with tpunb's magics; none if it is invalid."""
    tree, lost = parse_body(source)
    names = bound_names(tree) | {each.name for each in lost}
    own = any(name.startswith("tpu_") for name in cell_magics(source))
    return names | set(train_line(source).names) if own else names
