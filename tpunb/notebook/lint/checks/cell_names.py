"""Lint rules on cells that do not parse, and on names: undefined, removed, and those whose values
stay in the ranks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tpunb.notebook import removed_apis
from tpunb.notebook.convert.magics import RUN_NOTEBOOK
from tpunb.notebook.convert.names import defines_unseen
from tpunb.notebook.lint.checks.sites import is_tried, words
from tpunb.notebook.lint.findings import Severity
from tpunb.notebook.lint.index import NotebookIndex
from tpunb.notebook.lint.not_returned import Missing, find_not_returned
from tpunb.notebook.lint.rule_table import XLA, Hit, Rule
from tpunb.notebook.scopes import BUILTINS, ParsedCell, Site


@Rule(
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


NOT_RETURNED = "not-returned"


@Rule(
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
        if missing.trainer:
            fix = f"do this in cell [{number}], or return the model and use it instead of `{name}`"
        sure = missing.how is Missing.ONLY_ASSIGNED and site.simple()
        message = _MISSING[missing.how].format(name, number)
        severity: Severity | None = None if sure else "warning"
        yield Hit(site, message, fix, severity=severity, about=missing.train)


_MISSING = {
    Missing.ONLY_ASSIGNED: "`{}` exists only in the ranks of cell [{}]",
    Missing.TRAINED: "`{}` is trained in the ranks of cell [{}] and not returned: in the kernel it "
    "is untrained",
    Missing.HOLDS_MODEL: "`{}` trains in the ranks of cell [{}]: in the kernel its model is "
    "untrained",
    Missing.CHANGED: "`{}` is changed in the ranks of cell [{}] and not returned: in the kernel it "
    "is as before",
}

_DEFINED = BUILTINS | {
    *("display", "get_ipython", "In", "Out", "exit", "quit", "__IPYTHON__", "__file__"),
    *("__annotations__", "__class__", "__module__", "__qualname__"),
}
"""Names that Python or the kernel defines."""
_MAGIC = re.compile(r"\s*([%!]|[\w, ]+=\s*[%!])")
_WORD = re.compile(r"\w+")
_GENERIC = re.compile(r"^\s*(?:async\s+def|def|class|type)\s+\w+\[(.*?)\]", re.MULTILINE)
"""Type parameters: `def f[T](x)`, new in Python 3.12."""
_OWN = re.compile(r"_{1,3}|_i{1,3}|_i?\d+|_[io]h|_dh|_tpunb_\w+")
"""IPython's history variables, and names that the conversion adds to cells."""


@Rule(
    "undefined-name",
    "error",
    what="a name that no cell defines, or only a cell below",
    why="NameError when the line runs: on every core, perhaps at the end of the training (the "
    "names of all cells, in the notebook's order)",
    fix="define or import it in a cell above",
    kernel=True,
)
def _undefined_name(notebook: NotebookIndex) -> Iterator[Hit]:
    cells = [cell for cell in notebook.cells if cell.part != "kernel"]
    if notebook.sites.stars or any(cell.problem for cell in notebook.cells):
        return
    sources = ["\n".join(cell.plain) for cell in cells]
    if defines_unseen(sources) or any(f"{RUN_NOTEBOOK}(" in source for source in sources):
        return
    if any("%tpu_attach" in line for cell in notebook.cells for line in cell.lines):
        return  # may bind names that the attached run returned
    unseen = set().union(*(_words_of_magics(cell) for cell in notebook.cells))
    unseen |= {
        name for one in sources for found in _GENERIC.findall(one) for name in _WORD.findall(found)
    }
    if any("_tpunb_setup_shell(" in source for source in sources):
        unseen.add("_exit_code")
    for site, below in notebook.sites.unbound():
        assert isinstance(site.node, ast.Name)
        name = site.node.id
        if name in _DEFINED or name in unseen or name in notebook.held or _OWN.fullmatch(name):
            continue
        if site.cell.part == "kernel" or any(one.frame.cell.part == "kernel" for one in below):
            continue
        always = not any(site.conditions()) and not is_tried(site)
        if below:
            if site.cell.part == "train" or not always:
                continue  # the kernel may have a value for it
            message = f"`{name}` is defined only below, in cell [{below[0].frame.cell.number}]"
        elif _expects_name_error(site):
            continue
        else:
            message = f"`{name}` is not defined in any cell"
        severity: Severity | None = None if always else "warning"
        yield Hit(site, message, severity=severity, certain=not below)


def _words_of_magics(cell: ParsedCell) -> set[str]:
    """Names that magics and shell lines may define: `%%cython`, `%%capture out`, `a = !ls`."""
    if cell.plain == cell.lines:
        return set()
    other = any(cell.lines[line - 1].startswith("%%") for line in cell.left_out)
    lines = cell.lines if other else filter(_MAGIC.match, cell.lines)
    return {word for line in lines for word in _WORD.findall(line)}


def _expects_name_error(site: Site) -> bool:
    """Whether a handler around a site, or contextlib.suppress, catches a NameError."""
    around = [frame.node for frame in site.frame.outward() if frame.part == "body"]
    caught = [handler.type for node in around for handler in getattr(node, "handlers", ())]
    withs = [node for node in around if isinstance(node, ast.With | ast.AsyncWith)]
    caught += [item.context_expr for node in withs for item in node.items]
    return any(kind is None or "nameerror" in words(kind) for kind in caught)


@Rule(
    "retired-name",
    "error",
    what="a module, function or class that torch_xla 2.9 does not have, without a successor that "
    "runs could have in its place",
    why="ImportError or AttributeError when the line runs (each name was looked up in torch_xla "
    "2.9.0)",
    fix="use its replacement",
    kernel=True,
    backends=XLA,
)
def _retired_name(notebook: NotebookIndex) -> Iterator[Hit]:
    uses = [(site, name) for site in notebook.sites.imports for name in _imported(site.node)]
    uses += [(s, notebook.full(s.node, s)) for s in notebook.sites.attributes(*_RETIRED)]
    for site, name in uses:
        row = removed_apis.lookup_name(name)
        if row is not None and row.state == "missing" and not _for_old_releases(site):
            short = name.removeprefix("torch_xla.core.").removeprefix("torch_xla.distributed.")
            yield Hit(
                site,
                f"`{short}` does not exist in torch_xla 2.9",
                row.advice,
                certain=row.since != "2.9",  # the torch_xla 2.8 of Kaggle has it
            )


_RETIRED = {row.old.rpartition(".")[2] for row in removed_apis.NAMES if row.state == "missing"}


def _imported(node: ast.AST) -> list[str]:
    """The full names of the modules, classes and functions that an import names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        if any(node.module == row.old for row in removed_apis.MODULES):
            return [node.module]
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _for_old_releases(site: Site) -> bool:
    """Whether the code allows for a missing name: it is in `try`, or under a condition on the
    version or the attribute.
    """
    asked = {word for test, _ in site.conditions() for word in words(test)}
    return is_tried(site) or "hasattr" in asked or any("version" in word for word in asked)
