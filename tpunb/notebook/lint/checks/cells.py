"""Lint rules on cells that do not parse, debuggers, and values that ranks keep."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.not_returned import Missing, find_not_returned
from tpunb.notebook.lint.rules import Hit, rule


@rule(
    "not-python",
    "error",
    what="a cell that is not Python",
    why="a run is a Python script and cannot contain syntax that only IPython understands "
    "(Python's own parser, and IPython's for magics)",
    fix="fix the syntax error, or tag it tpu-skip to leave it out of runs",
)
def _not_python(notebook: NotebookIndex) -> Iterator[Hit]:
    for cell in notebook.cells:
        if cell.problem is not None and cell.part != "kernel":
            line, reason, kernel_runs_it = cell.problem
            harmless = kernel_runs_it and not notebook.has_train
            yield Hit((cell, line), reason, severity="hint" if harmless else None)


_DEBUGGERS = (
    *("breakpoint", "pdb.set_trace", "ipdb.set_trace", "pudb.set_trace", "code.interact"),
    *("IPython.core.debugger.set_trace", "IPython.embed", "torch.distributed.breakpoint"),
)


@rule(
    "debugger",
    "error",
    what="`breakpoint()` or another debugger in a run",
    why="a rank has no input: the debugger ends it with BdbQuit, or waits forever (observed: the "
    "standard input of a rank is empty)",
    fix="remove it, and debug on one core in a `%%tpu_debug` cell, with `--pdb` for an exception",
)
def _debugger(notebook: NotebookIndex) -> Iterator[Hit]:
    for site in notebook.calls_of(*_DEBUGGERS):
        if site.cell.runs or notebook.in_rank(site):
            name = ast.unparse(site.call.func)
            yield Hit(site, f"`{name}()` gets no input in a run", certain=True)


NOT_RETURNED = "not-returned"


@rule(
    NOT_RETURNED,
    "error",
    what="a cell below a train cell that uses a name which only the train cell assigns, or an "
    "object which it trains or changes, and which it does not return",
    why="ranks are separate processes: values that they create or change stay there (tpunb)",
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
