"""Convert a captured notebook to a Python script: `Snapshot` → `Script`."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.notebook.convert import (
    earlier_values,
    header,
    missing_changes,
    names,
    setup_lines,
    spmd,
    statements,
    syntax,
)
from tpunb.notebook.convert import export as export_
from tpunb.notebook.convert.cells import (
    EditedCell,
    LeftOutLine,
    LeftOutStatement,
    LostName,
    PlainCell,
    plain_python,
    skip_reason,
)
from tpunb.notebook.convert.front_end import FrontEndNames, mentions_front_end
from tpunb.notebook.convert.includes import IncludedFiles
from tpunb.notebook.convert.launch_calls import Launching, mentions_launch, replace_launch
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.requirements import find_requirements
from tpunb.notebook.convert.stack import written_for
from tpunb.notebook.errors import ConversionError
from tpunb.notebook.files import cell_magics
from tpunb.notebook.models import (
    Cell,
    CellKind,
    EarlierRun,
    EarlierValues,
    Export,
    LeftOut,
    MissingChange,
    Need,
    Omission,
    Requirement,
    Script,
    Snapshot,
)
from tpunb.notebook.scopes import ParsedCell, Scopes, changed_names, scopes_of
from tpunb.runs.spec import Block, Role
from tpunb.utils.secrets import without_secrets

if TYPE_CHECKING:
    from nbconvert.exporters import PythonExporter

TEMPLATES = Path(__file__).parent / "templates"


def convert(
    snapshot: Snapshot,
    got: Mapping[int, EarlierValues] | None = None,
    *,
    left: Callable[[str], str | None] = lambda name: None,
    held: Container[str] = (),
    export: Export | None = None,
) -> Script:
    """Return the script that `%%tpu_train` runs: the cells above the train cell, then its body.

    If `snapshot.train` is None, the script has all code cells. Left out, each with an Omission,
    are cells with the tag `tpu-skip` or the first line `# tpu: skip`, `%%tpu_debug` cells, and all
    cells below the train cell. Other train cells above it, and statements that call
    `tpunb.launch`, are replaced by code that reads the values in `got`, which the kernel has from
    them, by cell index. If `got` is None, the script runs on its own and executes them in place.
    Every other code cell becomes a block with the same number of lines, so line k of the cell is
    line `first + k - 1` of the script. Magics and shell lines are replaced in place; those that
    do not run in a script give an Omission.

    `left` returns an expression for the kernel's current value of a name that a statement with
    `tpunb.launch` makes or changes. `held` are names that no cell makes and whose plain values the
    run gets from the kernel (`tpunb.kernel.current_parameters`).

    The text is `py:percent` and runs without tpunb, as `python script.py` on one core and under
    torchrun on several. With `export`, it is for another machine, on which nothing that the
    notebook did exists.

    Raises ConversionError, with cell and line, if a cell is not Python or cannot work
    outside a notebook.
    """
    from nbformat import from_dict

    positions = _positions(snapshot.cells)
    cells = [_cell(cell, positions[cell.index], snapshot.train) for cell in snapshot.cells]
    conversion = Conversion(
        cells=cells,
        train=snapshot.train,
        notebook=snapshot.path,
        files=IncludedFiles(
            _folders(snapshot.path),
            setup=export is Export.WITH_SETUP,
            secrets=None if export is None else {},
        ),
        got=got,
        left=left,
        held=held,
        cells_left_out=[
            names.LeftOutCell(cell.index, snapshot.label(cell), reason, cell.source)
            for cell, reason in snapshot.left_out
        ],
        export=export is not None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warned about the cells when they ran
        # Without cells: nbconvert would copy and check them several times.
        body, resources = exporter().from_notebook_node(
            from_dict({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}),
            {"conversion": conversion},
        )
    conversion.omissions.sort(key=lambda entry: (entry[0], entry[1].line))
    return Script(
        body,
        _blocks(body, resources["header"], conversion.cells, whole=conversion.got is None),
        tuple(omission for _, omission in conversion.omissions),
        conversion.spmd,
        tuple(conversion.missing_changes),
        tuple(conversion.requirements),
    )


@cache
def exporter() -> PythonExporter:
    """Return nbconvert's exporter with our template and steps, which is made once."""
    from nbconvert.exporters import PythonExporter

    return PythonExporter(  # type: ignore[no-untyped-call]
        template_name="percent",
        extra_template_basedirs=[str(TEMPLATES)],
        default_preprocessors=[],
        preprocessors=[preprocess],
    )


def warm_up() -> None:
    """Do the imports and set-up that make the first conversion slow (seconds)."""
    syntax.warm_up()
    convert(Snapshot((), None, None, "nothing"))


def _folders(notebook: str | None) -> list[str]:
    """Folders that `%run` searches: the working directory, then the notebook's folder."""
    folders = [os.getcwd()]
    return [*folders, os.path.dirname(os.path.abspath(notebook))] if notebook else folders


def _positions(cells: tuple[Cell, ...]) -> list[int]:
    """Count the code cells up to each cell; the count is the number of a cell that never ran."""
    seen = 0
    return [seen := seen + (_kind(cell) == "code") for cell in cells]


def _kind(cell: Cell) -> CellKind:
    """Kind of a cell in the script: jupytext's tag turns a raw cell into code."""
    return "code" if cell.kind == "raw" and "active-py" in cell.tags else cell.kind


@dataclass
class ScriptCell:
    """A cell on its way into the script."""

    index: int
    number: int
    """That which is shown: its position if it never ran."""
    kind: CellKind
    source: str
    role: Role
    tags: tuple[str, ...]
    seconds: float | None
    cwd: str
    title: str = ""
    compiles: bool = False
    """It is known to be valid in the middle of a file."""
    trains: bool = False
    only_values: bool = False
    """It is another train cell, of which only the values are read."""


def _cell(cell: Cell, position: int, train: int | None) -> ScriptCell:
    return ScriptCell(
        index=cell.index,
        number=position if cell.number is None else cell.number,
        kind=_kind(cell),
        # A carriage return ends a line in a Python file, as it does in the kernel.
        source=cell.source.replace("\r\n", "\n").replace("\r", "\n"),
        role="train" if cell.index == train else "prelude",
        tags=cell.tags,
        seconds=cell.seconds,
        cwd=cell.cwd,
    )


def _blocks(body: str, head: str, cells: list[ScriptCell], *, whole: bool) -> tuple[Block, ...]:
    """Locate each cell in the script, by counting the lines of the template's layout.

    Unless `whole`, cells of which everything is left out are not among them: to run one again, or
    to keep a copy after it, would serve nothing.
    """
    lines = body.split("\n")
    end = head.count("\n")
    blocks = [Block("header", 1, end)]
    end += 1  # the blank line below the header
    for cell in cells:
        source = cell.source.split("\n")
        first, last = end + 2, end + 1 + len(source)  # below its title
        if lines[first - 1 : last] != source:
            raise AssertionError(f"the template does not keep the lines of {cell.source!r}")
        end = last + 1  # the blank line below it
        code = whole or cell.role != "prelude" or any(map(_is_code, source))
        if cell.kind == "code" and code:
            values = cell.only_values
            seconds = None if values else cell.seconds  # those of its run
            blocks.append(
                Block(cell.role, first, last, cell.index, cell.number, seconds, values, cell.cwd)
            )
    return tuple(blocks)


def _is_code(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


@dataclass
class Conversion:
    """State of a conversion: the cells, and what each step collects for later ones."""

    train: int | None
    notebook: str | None
    files: IncludedFiles
    got: Mapping[int, EarlierValues] | None
    cells_left_out: list[names.LeftOutCell]
    left: Callable[[str], str | None] = lambda name: None
    held: Container[str] = ()
    """Names whose plain values the run gets from the kernel."""
    cells: list[ScriptCell] = field(default_factory=list)
    omissions: list[tuple[int, Omission]] = field(default_factory=list)
    """Each with the index of its cell."""
    lost: list[tuple[int, LostName]] = field(default_factory=list)
    """Each with the number of its cell."""
    features: list[str] = field(default_factory=list)
    """Imports from `__future__`."""
    builtins: list[str] = field(default_factory=list)
    """Keys of `header.BUILTINS` that the header must define."""
    spmd: str | None = None
    missing_changes: list[MissingChange] = field(default_factory=list)
    results: set[str] = field(default_factory=set)
    """Names of `--out` of other train cells."""
    export: bool = False
    """True if the script is for another machine."""
    requirements: list[Requirement] = field(default_factory=list)
    """What the script needs on that machine."""
    trains_in_place: bool = False
    """True if earlier train cells, or calls of `tpunb.launch`, run in the script itself."""
    calls: list[str] = field(default_factory=list)
    """Calls at the end of an exported script's header."""

    def __deepcopy__(self, memo: object) -> Conversion:
        """Return self: nbconvert copies its steps' resources, but a kernel's values must not be."""
        return self

    @property
    def code(self) -> list[ScriptCell]:
        return [cell for cell in self.cells if cell.kind == "code"]

    def trees(self) -> list[tuple[ScriptCell, ast.Module]]:
        """The code cells with their syntax trees. Raises ConversionError."""
        return [(cell, statements.parse_cell(cell.source, cell.number)) for cell in self.code]

    def edit(self, cell: ScriptCell, edited: EditedCell | PlainCell) -> None:
        """Replace the text of a cell, and record what it leaves out."""
        cell.source = "\n".join(edited.lines)
        cell.compiles = isinstance(edited, PlainCell) and edited.compiles
        self.add_omissions(cell, edited.left_out)
        self.lost += [(cell.number, lost) for lost in edited.lost]

    @cached_property
    def run(self) -> names.RunCells:
        """The code cells, when they are complete."""
        return names.RunCells(
            [names.RunCell(cell.number, cell.source, cell.index) for cell in self.code]
        )

    def add_omissions(self, cell: ScriptCell, lines: Iterable[LeftOutLine]) -> None:
        """Record lines of a cell that are left out."""
        for line, text, reason in lines:
            omission = Omission(cell.number, line, text, reason)
            self.omissions.append((cell.index, omission))

    @property
    def sources(self) -> list[str]:
        """The code of all cells, those of included notebooks too."""
        return [*(cell.source for cell in self.code), *self.files.sources([""])]

    @property
    def needs_tpunb(self) -> bool:
        """True if an exported script imports tpunb."""
        return self.export and export_.needs_tpunb(self.sources)

    @property
    def arguments(self) -> str:
        """The arguments of the call that prepares a process for the script."""
        if self.spmd is not None:
            return "spmd=True"
        backend = written_for(self.run.sources)
        return "" if backend in (None, "xla") else f'backend="{backend}"'

    def header(self) -> str:
        """The script's first cell."""
        return header.header_text(
            self.notebook,
            self.features,
            self.builtins,
            self.files.notebooks,
            spmd=self.spmd is not None,
            notes=_notes(self),
            code="\n".join(self.sources),
            prepare=None if self.export else self.arguments,
            calls=self.calls,
            done=not self.files.setup,
        )


def _notes(conversion: Conversion) -> list[str]:
    needs = [f"- {requirement}" for requirement in conversion.requirements]
    needs += ["- tpunb: pip install tpunb"] if conversion.needs_tpunb else []
    return ["What it needs but does not contain:", *needs, ""] if needs else []


def preprocess(nb: Any, resources: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Run all steps, as a preprocessor of nbconvert."""
    conversion: Conversion = resources["conversion"]
    for step in STEPS:
        step(conversion)
    resources["header"] = conversion.header()
    return nb, resources


def leave_out_cells(conversion: Conversion) -> None:
    """Replace cells that are not part of the run by a line with the reason; drop those below."""
    train = conversion.train
    kept = []
    for cell in conversion.cells:
        below = train is not None and cell.index > train
        reason = _why_left_out(cell, below) if cell.kind == "code" else None
        if reason is LeftOut.TRAIN_CELL and (out := earlier_values.train_line(cell.source).out):
            conversion.results.add(out)
        if reason is not None and cell.source.strip():
            number, line = cell.number, _first_line(cell.source)
            if reason is LeftOut.TRAIN_CELL and conversion.got is None:
                kept.append(cell)  # it runs in place
                continue
            conversion.add_omissions(cell, [LeftOutLine(1, line, reason)])
            got = (conversion.got or {}).get(cell.index, EarlierValues())
            conversion.cells_left_out.append(
                names.LeftOutCell(cell.index, f"cell [{number}]", reason, cell.source, got)
            )
            if reason is LeftOut.TRAIN_CELL and got.runs:
                head = f"# another train cell, replaced by its values: {line}"
                cell.source = "\n".join([head, *earlier_values.read_back(got)])
                cell.only_values = True
                kept.append(cell)
                continue
            cell.kind = "markdown"
            cell.source = f"cell [{number}] is left out, {reason}: {line}"
        if not below and (cell.source.strip() or cell.role == "train"):
            kept.append(cell)
    conversion.cells = kept


def _why_left_out(cell: ScriptCell, below: bool) -> LeftOut | None:
    if cell.role == "train":
        return None
    if reason := skip_reason(cell.source, cell.tags):
        return reason
    magics = cell_magics(cell.source)
    if "tpu_debug" in magics:
        return LeftOut.DEBUG_CELL
    if below:
        return LeftOut.BELOW
    return LeftOut.TRAIN_CELL if "tpu_train" in magics else None


def _first_line(source: str) -> str:
    line = without_secrets(source.strip().partition("\n")[0].strip())
    return line if len(line) <= 60 else f"{line[:59]}…"


def leave_out_calls_of_runs(conversion: Conversion) -> None:
    """Leave out code that starts runs, such as a loop over learning rates, and the lines below it.

    In the running cell, the lines below have not run yet; in an earlier cell, they work with the
    results of the runs.
    """
    for cell in conversion.code:
        first = statements.first_call_of_run(cell.source)
        if cell.role == "prelude" and first is not None:
            edited = EditedCell(cell.source.split("\n"))
            rest = "\n".join(edited.lines[first - 1 :])
            edited.lose(first, edited.lines[first - 1], names.defined_names(rest))
            edited.drop(first - 1, len(edited.lines) - first + 1, LeftOut.TPUNB_MAGIC)
            conversion.edit(cell, edited)


def replace_special_syntax(conversion: Conversion) -> None:
    """Replace magics, shell lines and IPython's other special syntax."""
    tpunb = not conversion.export
    if not tpunb:
        above = [cell.source for cell in conversion.code if cell.role == "prelude"]
        tpunb = any(map(export_.hands_on, above))
        tpunb |= export_.needs_tpunb([cell.source for cell in conversion.code])
    for cell in conversion.code:
        number, got = cell.number, (conversion.got or {}).get(cell.index)
        if (got is not None and got.runs) or conversion.trains_in_place:
            cell.source = earlier_values.put_for_attach(cell.source, got)
        cell.trains = cell.role == "train" or "tpu_train" in cell_magics(cell.source)
        files, train = conversion.files, cell.trains
        try:
            plain = plain_python(cell.source, train, files.secrets, files.setup)
        except NotPythonError as error:
            line = cell.source.split("\n")[error.line - 1]
            raise ConversionError(str(error), number, error.line, line) from None
        if cell.role == "prelude" and "tpu_train" in cell_magics(cell.source):
            conversion.trains_in_place = True
            options = earlier_values.train_line(cell.source)
            lines = earlier_values.in_place(plain.lines, options, tpunb=tpunb)
            plain = replace(plain, lines=tuple(lines))
        conversion.edit(cell, plain)
        for at, text in enumerate(plain.lines if files.secrets else (), 1):
            for name in dict.fromkeys(setup_lines.READS_SECRET.findall(text)):
                conversion.requirements.append(Requirement(number, at, Need.SECRET, name))


def begin_training(conversion: Conversion) -> None:
    """Let train cells say that the lines that they reach run in each rank."""
    if not any(map(_has_lines, conversion.sources)):
        return
    for cell in conversion.code:
        if not cell.trains:
            continue
        in_place = earlier_values.is_train_cell(cell.source)
        lines = cell.source.split("\n")
        at = next(
            index
            for index, line in enumerate(lines)
            if line.strip() and (not in_place or earlier_values.is_train_cell(line))
        )
        if at and not in_place:  # the call of tpunb.launch, below an empty line
            lines[at - 1] = setup_lines.BEGIN
        else:
            lines[at] = f"{setup_lines.BEGIN}{'  ' if lines[at][0] == '#' else '; '}{lines[at]}"
        if cell.role == "prelude":
            lines.append(setup_lines.END)
        cell.source = "\n".join(lines)


def _has_lines(source: str) -> bool:
    return "_tpunb_setup_" in source.replace("_tpunb_setup_cd(", "")  # which is the same anywhere


def include_files(conversion: Conversion) -> None:
    """Include the notebooks that `%run` runs."""
    files = conversion.files
    for cell in conversion.code:
        cell.source = files.include(cell.source, cell.number, cell.trains, cell.cwd)
        conversion.omissions += [(cell.index, omission) for omission in files.omissions]
        files.omissions.clear()


def leave_out_front_end(conversion: Conversion) -> None:
    """Leave out calls that need the notebook's front end or the user's input."""
    if not any(mentions_front_end(cell.source) for cell in conversion.code):
        return
    trees = conversion.trees()
    front_end = FrontEndNames([tree for _, tree in trees])
    for cell, tree in trees:
        edited = EditedCell(cell.source.split("\n"))
        front_end.leave_out(edited, tree)
        if edited.left_out:
            conversion.edit(cell, edited)
        front_end.refuse(cell.source, cell.number)


def replace_launches(conversion: Conversion) -> None:
    """Replace statements that start other runs by the values that they left in the kernel, and that
    other code reads.

    In a script that runs on its own, they call their function in place.
    """
    if not any(mentions_launch(cell.source) for cell in conversion.code):
        return
    trees = conversion.trees()
    if conversion.got is None:
        _launch_here(conversion, trees)
        return
    launching = Launching([tree for _, tree in trees])
    starts = {
        id(cell): list(launching.statements(tree)) for cell, tree in trees if cell.role != "train"
    }
    others = [
        ast.Module([node for node in tree.body if node not in starts.get(id(cell), ())], [])
        for cell, tree in trees
    ]
    scopes = scopes_of(*others)
    for cell, _ in trees:
        edited = EditedCell(cell.source.split("\n"))
        for node in reversed(starts.get(id(cell), ())):
            text = ast.unparse(node)
            brought = {
                name: value
                for name in sorted(changed_names(ast.Module([node], [])))
                if scopes.may_read(name) and (value := conversion.left(name)) is not None
            }
            edited.leave_out([LeftOutStatement(node, LeftOut.LAUNCH)])
            if brought:
                edited.fill(node, earlier_values.assign(brought))
            conversion.cells_left_out.append(
                names.LeftOutCell(
                    cell.index,
                    f"cell [{cell.number}]",
                    LeftOut.LAUNCH,
                    text,
                    EarlierValues((EarlierRun("", tuple(brought)),)),
                )
            )
        if edited.left_out:
            conversion.edit(cell, edited)


def _launch_here(conversion: Conversion, trees: list[tuple[ScriptCell, ast.Module]]) -> None:
    scopes = scopes_of(*(tree for _, tree in trees))
    for cell, tree in trees:
        if earlier_values.is_train_cell(cell.source):
            continue  # as in the notebook, where a rank calls the function itself
        source = replace_launch(cell.source, tree, scopes, earlier_values.CALL_HELPER)
        if source != cell.source:
            cell.source = source
            conversion.trains_in_place = True


def leave_out_run_folders(conversion: Conversion) -> None:
    """Leave code that only displays run folders out of a script on its own, which has none."""
    if not conversion.trains_in_place:
        return
    trees = conversion.trees()
    scopes = scopes_of(*(tree for _, tree in trees))
    lost: set[str] = set()
    for cell, tree in trees:
        runs = (earlier_values.CALL_HELPER, earlier_values.BEGIN)
        if cell.role == "train" or any(name in cell.source for name in runs):
            continue  # these cells do not only display what they read
        edited = EditedCell(cell.source.split("\n"))
        try:
            earlier_values.leave_out_run_folder_reads(
                edited, tree, scopes, conversion.results, lost
            )
        except earlier_values.RunFolderError as error:
            number, line = cell.number, edited.lines[error.line - 1]
            raise ConversionError(str(error), number, error.line, line) from None
        if edited.left_out:
            conversion.edit(cell, edited)


def fit_into_one_file(conversion: Conversion) -> None:
    """Rewrite code that is invalid in the middle of a file; check that every cell compiles."""
    files = conversion.files
    scopes = _scopes_for_tasks(conversion)
    kernel_only: list[tuple[ScriptCell, ast.Module]] = []
    for cell in conversion.code:
        number = cell.number
        # Outside a notebook, `display` and `get_ipython` are undefined or work differently.
        named = any(name in cell.source for name in header.BUILTINS)
        hoisted = any(word in cell.source for word in statements.HOISTED_WORDS)
        tasks = any(word in cell.source for word in statements.TASK_WORDS)
        if not cell.compiles or named or hoisted or tasks:
            tree = statements.parse_cell(cell.source, number)
            if tasks or (not cell.compiles and "await" in cell.source):
                rewritten = statements.rewrite_awaits(cell.source, tree, scopes)
                if rewritten != cell.source:
                    cell.compiles = False
                    cell.source, tree = rewritten, statements.parse_cell(rewritten, number)
            source, features = statements.hoist(cell.source, tree)
            cell.compiles &= source == cell.source
            cell.source = source
            conversion.features += features
            kernel_only += [(cell, tree)] if named else []
    for cell in conversion.code:
        if conversion.features or not cell.compiles:
            statements.check_compiles(cell.source, cell.number, conversion.features)
    included = [ParsedCell(-1, ast.parse(source)) for source in files.sources(header.BUILTINS)]
    own = [
        ParsedCell(cell.index, tree, cell.number, lines=cell.source.split("\n"))
        for cell, tree in kernel_only
    ]
    scopes = Scopes([*included, *own])
    for parsed in own:
        statements.refuse_ipython_calls(parsed, scopes)
    conversion.builtins = [name for name in header.BUILTINS if scopes.needs(name)]


def _scopes_for_tasks(conversion: Conversion) -> Scopes:
    """Return the names of all cells if a cell may start a task; otherwise no names."""
    tasks = any(word in cell.source for cell in conversion.code for word in statements.TASK_WORDS)
    trees = conversion.trees() if tasks else ()
    return scopes_of(*(tree for _, tree in trees))


def read_as_a_whole(conversion: Conversion) -> None:
    """Refuse cells that need names a run cannot have; determine whether the run uses SPMD."""
    run = conversion.run
    missing = names.missing_names(conversion.cells_left_out, conversion.lost)
    held = () if conversion.train is None else conversion.held
    names.refuse_missing(run, missing, held)
    conversion.missing_changes = missing_changes.find_missing_changes(
        run, conversion.cells_left_out, held
    )
    conversion.spmd = spmd.spmd_reason(run)


def prepare_for_export(conversion: Conversion) -> None:
    """Determine what an exported script needs on another machine, and how it becomes a rank."""
    if not conversion.export:
        return
    run = conversion.run
    omissions = [omission for _, omission in conversion.omissions]
    conversion.requirements += find_requirements(run, omissions, conversion.files.folders)
    place = export_.place_for_preparing([ast.parse(cell.source) for cell in conversion.code])
    first, call = export_.calls_of_script(
        run.sources,
        [] if place is None else run.sources[: place[0] + 1],
        tpunb=conversion.needs_tpunb,
        spmd=conversion.spmd is not None,
        arguments=conversion.arguments,
    )
    if call and place is not None:
        cell = conversion.code[place[0]]
        lines = cell.source.split("\n")
        lines[place[1] - 1] += f"; {call}"
        cell.source = "\n".join(lines)
        call = ""
    conversion.calls = [line for line in (first, call) if line]


def write_titles(conversion: Conversion) -> None:
    """Write the titles of code cells, and comment out the text of all other cells."""
    for cell in conversion.cells:
        if cell.kind == "code":
            cell.title = _title(cell, conversion.spmd is not None)
        else:
            cell.title = f"# %% [{cell.kind}]"
            cell.source = "\n".join(_commented(line) for line in cell.source.split("\n"))


def _title(cell: ScriptCell, spmd: bool) -> str:
    title = f"# %% cell {cell.number}"
    if cell.trains:
        title += ", on all cores" if spmd else ", on every core"
    if cell.tags:
        quoted = ", ".join('"{}"'.format(tag.replace('"', "'")) for tag in cell.tags)
        title += f" tags=[{quoted}]"
    return " ".join(title.split())


def _commented(line: str) -> str:
    # A comment must not look like the beginning of a cell. Null characters are not
    # allowed anywhere in a Python file.
    line = line.replace("\0", "\N{REPLACEMENT CHARACTER}")
    mark = "# | " if line.lstrip().startswith("%%") else "# "
    return f"{mark}{line}".rstrip()


STEPS = (
    leave_out_cells,
    leave_out_calls_of_runs,
    replace_special_syntax,
    include_files,
    begin_training,
    leave_out_front_end,
    replace_launches,
    leave_out_run_folders,
    fit_into_one_file,
    read_as_a_whole,
    prepare_for_export,
    write_titles,
)
