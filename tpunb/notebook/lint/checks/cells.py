"""Lint rules on cells that do not parse or run twice, and on names that are missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.convert.earlier_values import train_line
from tpunb.notebook.convert.magics import RUN_HELPERS
from tpunb.notebook.convert.statements import bindings, bound_names
from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import argument, call, last_part
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Frame, ParsedCell, Site

USUAL = {
    "xm": "import torch_xla.core.xla_model as xm",
    "xmp": "import torch_xla.distributed.xla_multiprocessing as xmp",
    "xr": "import torch_xla.runtime as xr",
    "torch_xla": "import torch_xla",
}
"""The usual names of torch_xla's modules, with their imports."""


@rule(
    "not-python",
    "error",
    what="a cell that is not Python",
    fact="a run is a Python script and cannot contain syntax that only IPython understands",
    source="Python's own parser, and IPython's for magics",
    fix="fix the syntax error, or tag it tpu-skip to leave it out of runs",
)
def _not_python(notebook: NotebookIndex) -> Iterator[Hit]:
    for cell in notebook.cells:
        if cell.problem is not None and cell.part != "kernel":
            line, reason, kernel_runs_it = cell.problem
            severity: Severity | None = None
            if kernel_runs_it and not notebook.has_train:
                severity = "hint"
            yield Hit((cell, line), reason, severity=severity)


@rule(
    "missing-import",
    "error",
    what="`xm.`, `xmp.`, `xr.` or `torch_xla.` without an import in the notebook",
    fact="NameError on every core",
    source="Python",
    fix="import it in a cell above",
    kernel=True,
)
def _missing_import(notebook: NotebookIndex) -> Iterator[Hit]:
    if any(cell.problem for cell in notebook.cells):
        return  # the import may be in the cell that cannot be read
    for name, line in USUAL.items():
        if notebook.names.bound(name):
            continue
        for site in notebook.sites.loads(name)[:1]:
            always = site.simple() or not any(site.conditions())
            severity: Severity | None = None if always else "warning"
            fix = f"write `{line}` in a cell above"
            yield Hit(site, f"`{name}` is never imported", fix, severity=severity)


_DEBUGGERS = (
    *("breakpoint", "pdb.set_trace", "ipdb.set_trace", "pudb.set_trace", "code.interact"),
    *("IPython.core.debugger.set_trace", "IPython.embed", "torch.distributed.breakpoint"),
)


@rule(
    "debugger",
    "error",
    what="`breakpoint()` or another debugger in a run",
    fact="a rank has no input: the debugger ends it with BdbQuit, or waits forever",
    source="observed: the standard input of a rank is empty",
    fix="remove it, and debug on one core in a `%%tpu_debug` cell, with `--pdb` for an exception",
)
def _debugger(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*_DEBUGGERS):
        if site.cell.runs or notebook.in_rank(site):
            name = ast.unparse(call(site).func)
            yield Hit(site, f"`{name}()` gets no input in a run", certain=True)


_REMOVING = {
    *("os.remove", "os.unlink", "os.rmdir", "os.removedirs", "os.rename", "os.replace"),
    *("shutil.rmtree", "shutil.move"),
}
"""Calls after which the path in their first argument no longer exists."""


@rule(
    "runs-once",
    "hint",
    what="a cell above the train cell that cannot run a second time: it removes or moves a file "
    "that it has read, or creates one with mode 'x'",
    fact="a run executes the cells above the train cell again: FileNotFoundError for the file that "
    "is gone, FileExistsError for mode 'x'",
    source="tpunb; docs/guide.md, 'What can be done only once'",
    fix="do it in a cell that is tagged tpu-skip, or check first whether the file exists",
)
def _runs_once(notebook: NotebookIndex) -> Iterator[Hit]:
    if not notebook.has_train:
        return
    reads = [s for s in notebook.sites.calls if s.cell.part == "prelude" and not _guarded(s)]
    for site in reads:
        node = call(site)
        full = notebook.full(node.func, site)
        if full in _REMOVING and node.args:
            place = ast.unparse(node.args[0])
            for read in reads:
                first = (read.cell.index, read.line) < (site.cell.index, site.line)
                if first and _names(notebook, read, place):
                    line = f"cell [{read.cell.number}], line {read.line}"
                    yield Hit(site, f"`{place}` no longer exists when {line} runs again")
                    break
        elif full == "open" and _mode(node) is not None and "x" in str(_mode(node)):
            yield Hit(site, "mode 'x' creates a file, which already exists when this runs again")


def _names(notebook: NotebookIndex, read: Site, place: str) -> bool:
    """Whether a call reads a file by the same expression: `open(p)`, `ZipFile(p)`, `load(p)`."""
    node = call(read)
    if not node.args or ast.unparse(node.args[0]) != place:
        return False
    full, mode = notebook.full(node.func, read), _mode(node)
    makes = full == "open" and mode is not None and not str(mode).startswith("r")
    asks = full.startswith(("os.path.", "pathlib.", "os.m")) or full in _REMOVING
    looks = isinstance(node.func, ast.Name) and node.func.id in ("print", "str", "len", "Path")
    return not (makes or asks or looks) and not last_part(node.func).startswith(("save", "dump"))


def _mode(node: ast.Call) -> object:
    value = argument(node, "mode", 1)
    return value.value if isinstance(value, ast.Constant) else None


def _guarded(site: Site) -> bool:
    """Whether a site is under a condition or in `try`, which may check if it has run before."""
    tries = (ast.Try, ast.ExceptHandler)
    return any(site.conditions()) or any(isinstance(f.node, tries) for f in site.frame.outward())


_BINDING = ("globals", "exec", *RUN_HELPERS)
"""Functions that may bind any name; `%run` is converted to one of the last three."""
_SAVING = ("save", "save_checkpoint", "save_model", "save_pretrained", "push_to_hub")


@rule(
    "not-returned",
    "error",
    what="a cell below a train cell that uses a name which only the train cell assigns, or a model "
    "which it trains, and which it does not return",
    fact="ranks are separate processes: values that they create or change stay there",
    source="tpunb",
    fix="add `--returns NAME` to the train cell",
    kernel=True,
)
def _not_returned(notebook: NotebookIndex) -> Iterator[Hit]:
    trains = {c.index: c for c in notebook.cells if c.part == "train"}
    lines = {index: train_line("\n".join(cell.lines)) for index, cell in trains.items()}
    stars = any(bindings(cell.tree.body).stars for cell in notebook.cells)
    if not trains or stars or any(cell.problem for cell in notebook.cells):
        return
    if any(line.unclear for line in lines.values()) or any(map(notebook.sites.loads, _BINDING)):
        return
    brought = {name for line in lines.values() for name in line.names}
    made = {cell.index: bound_names(cell.tree) for cell in notebook.cells}
    elsewhere = set().union(*(names for index, names in made.items() if index not in trains))
    for index, train in trains.items():
        for name in sorted(made[index] - brought - elsewhere):
            for site in _reads_below(notebook, name, train):
                if name not in made[site.cell.index]:
                    yield Hit(
                        site,
                        f"`{name}` exists only in the ranks of cell [{train.number}]",
                        f"add `--returns {name}` to cell [{train.number}]",
                        severity=None if site.simple() else "warning",
                    )
                    break
        if lines[index].names or _saves(train):
            continue
        for name in sorted(_models(train) & elsewhere - made[index]):
            for site in _reads_below(notebook, name, train):
                between = {cell for cell in made if index < cell <= site.cell.index}
                loads = notebook.sites.attributes("load_state_dict")
                if any(load.cell.index in between for load in loads) or any(
                    name in made[cell] for cell in between
                ):
                    break
                yield Hit(
                    site,
                    f"`{name}` is trained in the ranks of cell [{train.number}] and not returned: "
                    "in the kernel it is untrained",
                    f"add `--returns {name}` to cell [{train.number}]",
                    severity="warning",
                )
                break


def _reads_below(notebook: NotebookIndex, name: str, train: ParsedCell) -> Iterator[Site]:
    """Yield the sites in cells below a train cell that read a global name."""
    for site in notebook.sites.loads(name):
        function = site.frame.function
        while function is not None and name not in {*function.locals, *function.parameters}:
            function = function.outer.function
        if function is None and site.cell.index > train.index and not _is_own(name, site.frame):
            yield site


def _is_own(name: str, frame: Frame | None) -> bool:
    """Whether a comprehension around a node binds a name itself."""
    while frame is not None:
        for generator in getattr(frame.node, "generators", ()):
            targets = ast.walk(generator.target)
            if any(isinstance(node, ast.Name) and node.id == name for node in targets):
                return True
        frame = frame.parent
    return False


def _models(train: ParsedCell) -> set[str]:
    """The names of models whose parameters a train cell reads, as for an optimizer."""
    return {
        node.value.id
        for node in ast.walk(train.tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "parameters"
        and isinstance(node.value, ast.Name)
    }


def _saves(train: ParsedCell) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr in _SAVING for node in ast.walk(train.tree)
    )
