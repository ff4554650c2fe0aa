"""Scripts for another machine: whether they import tpunb, and where they become ranks."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence

from tpunb.notebook.convert import earlier_values
from tpunb.notebook.convert.header import ONE_RANK
from tpunb.notebook.convert.stack import written_for
from tpunb.notebook.convert.statements import executed
from tpunb.notebook.scopes import dotted, packages

_IMPORTS = re.compile(r"^\s*(?:import\s[^#]*\btpunb\b|from\s+tpunb\b)", re.MULTILINE)
_GROUP = re.compile(r"torch\.distributed|init_process_group|RANK|WORLD_SIZE")


def needs_tpunb(sources: Sequence[str]) -> bool:
    """True if a cell imports tpunb, or is a train cell that hands values on in its place."""
    return any(_IMPORTS.search(source) or earlier_values.BEGIN in source for source in sources)


def hands_on(source: str) -> bool:
    """True if a train cell has values for the cells below."""
    options = earlier_values.train_line(source)
    return bool(options.names) or options.unclear


def calls_of_script(
    sources: Sequence[str], above: Sequence[str], *, tpunb: bool, spmd: bool, arguments: str
) -> tuple[str, str]:
    """Return the calls that make the script's process a rank: at its top, and before it trains.

    `above`: the sources above the second. `arguments` are those of `standalone.prepare`. Either
    call may be ''.
    """
    if spmd:
        return "", f"_tpunb_prepare({arguments})" if tpunb else ""
    xla = written_for(sources) == "xla"
    groups = any(map(_GROUP.search, above if tpunb else sources))
    first = f"{ONE_RANK}()" if groups or not (xla or tpunb) else ""
    if tpunb:
        return first, f"_tpunb_prepare({arguments})"
    return first, "_tpunb_join_ranks()" if xla else ""


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
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("os.environ["):
        return True
    if not isinstance(node, ast.Expr | ast.Assign):
        return False
    call = node.value
    call = call.value if isinstance(call, ast.Subscript) else call
    return isinstance(call, ast.Call) and dotted(call.func).startswith("_tpunb_setup_")
