"""Lint rules on cells that do not parse or run twice, and on names that are missing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.names import argument, call, last_part
from tpunb.notebook.lint.not_returned import Missing, find_not_returned
from tpunb.notebook.lint.rules import Hit, rule
from tpunb.notebook.lint.walk import Site

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


NOT_RETURNED = "not-returned"


@rule(
    NOT_RETURNED,
    "error",
    what="a cell below a train cell that uses a name which only the train cell assigns, or an "
    "object which it trains or changes, and which it does not return",
    fact="ranks are separate processes: values that they create or change stay there",
    source="tpunb",
    fix="add `--returns NAME` to the train cell",
    kernel=True,
)
def _not_returned(notebook: NotebookIndex) -> Iterator[Hit]:
    for missing in find_not_returned(notebook):
        name, number, site = missing.name, missing.train.number, missing.site
        fix = f"add `--returns {name}` to cell [{number}]"
        if missing.how is Missing.ONLY_IMPORTED:
            fix = "import it here too, or in a cell above"
        elif missing.trainer:
            fix = f"do this in cell [{number}], or return the model and use it instead of `{name}`"
        sure = missing.how in (Missing.ONLY_ASSIGNED, Missing.ONLY_IMPORTED) and site.simple()
        message = _MISSING[missing.how].format(name, number)
        severity: Severity | None = None if sure else "warning"
        yield Hit(site, message, fix, severity=severity, about=missing.train)


_MISSING = {
    Missing.ONLY_ASSIGNED: "`{}` exists only in the ranks of cell [{}]",
    Missing.ONLY_IMPORTED: "`{}` is imported in the ranks of cell [{}] only",
    Missing.TRAINED: "`{}` is trained in the ranks of cell [{}] and not returned: in the kernel it "
    "is untrained",
    Missing.HOLDS_MODEL: "`{}` trains in the ranks of cell [{}]: in the kernel its model is "
    "untrained",
    Missing.CHANGED: "`{}` is changed in the ranks of cell [{}] and not returned: in the kernel it "
    "is as before",
}
