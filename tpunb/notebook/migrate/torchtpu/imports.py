"""Removes imports of torch_xla that nothing uses any longer, and adds what the new code needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tpunb.notebook.convert.cells import skip_reason
from tpunb.notebook.files import cell_magics
from tpunb.notebook.migrate.cell import CodeCell, last_line_of, line_of
from tpunb.notebook.migrate.names import ROOTS, NotebookNames
from tpunb.notebook.migrate.torchtpu.edits import DDP, MODULES, Edits
from tpunb.notebook.migrate.torchtpu.helpers import HELPERS
from tpunb.notebook.scopes import Function, packages

Import = ast.Import | ast.ImportFrom
INSTEAD = "import torch_tpu"
"""In a `try` or an `if`, where an import asks whether there is a TPU."""


def rewrite_imports(cells: Sequence[CodeCell], edits: Edits) -> None:
    """Edit the imports of cells whose code is rewritten already.

    `edits`: what that code needs.
    """
    names = NotebookNames(cells)
    sites = [
        (cell, node)
        for cell, node in names.walk()
        if isinstance(node, Import) and packages(node) & set(ROOTS)
    ]
    home = _home(names, edits)
    anchor = next((node for cell, node in sites if cell is home and _at_top(names, node)), None)
    if home is not None:
        _add(names, home, anchor, edits)
    blocks: set[int] = set()
    for cell, node in sites:
        kept = [alias for alias, name in _aliases(node) if _is_used(names, node, alias, name)]
        _shorten(names, cell, node, kept, blocks)


def _at_top(names: NotebookNames, node: Import) -> bool:
    return isinstance(names.parents[node], ast.Module) and names.is_alone(node)


def _home(names: NotebookNames, edits: Edits) -> CodeCell | None:
    """The cell that gets imports and helpers: one that all runs contain, above their first use."""
    if edits.first is None or not (edits.modules or edits.helpers or edits.ddp):
        return None
    above = [cell for index, cell in names.cells.items() if index <= edits.first and cell.tree.body]
    every = [cell for cell in above if cell.file or _is_prelude(cell)]
    code = [cell for cell in every if not all(isinstance(one, ast.Pass) for one in cell.tree.body)]
    if not code and len(edits.code.trains) == 1:
        return names.cells.get(edits.first)
    with_imports = [cell for cell in code if imports_at_top(cell.tree.body)]
    return next(reversed(with_imports or code or every or above), None)


def _is_prelude(cell: CodeCell) -> bool:
    """Whether the kernel runs a cell, and each run above its train cell."""
    magics = cell_magics(cell.text)
    kernel = "tpu_train" in magics or "tpu_debug" in magics
    return not kernel and skip_reason(cell.text, ()) is None


def imports_at_top(body: list[ast.stmt]) -> int:
    """The number of statements up to the last import at the top of a cell."""
    count = 0
    for at, statement in enumerate(body):
        if isinstance(statement, Import):
            count = at + 1
        elif not isinstance(statement, ast.Expr | ast.Pass):  # a docstring, a magic
            break
    return count


def _aliases(node: Import) -> Iterator[tuple[ast.alias, str]]:
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias, alias.asname or alias.name
        else:
            yield alias, alias.asname or alias.name.partition(".")[0]


def _is_used(names: NotebookNames, node: Import, alias: ast.alias, name: str) -> bool:
    """Whether an import of one name must stay: something reads the name, or it is no torch_xla."""
    if isinstance(node, ast.Import) and alias.name.partition(".")[0] not in ROOTS:
        return True
    scope = names.scope(node)
    if alias.name == "*":
        return True
    uses = names.references(name, scope)
    return any(
        any(full.partition(".")[0] in ROOTS for full in names.full_names(use)) for use in uses
    )


def _shorten(
    names: NotebookNames,
    cell: CodeCell,
    node: Import,
    kept: list[ast.alias],
    blocks: set[int],
) -> None:
    """Leave out the names of an import that are not kept."""
    if len(kept) == len(node.names):
        return
    if kept:
        written = ", ".join(ast.unparse(alias) for alias in kept)
        head = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
        cell.replace_node(node, f"{head}import {written}")
        return
    parent = names.parents[node]
    if isinstance(parent, ast.Module | Function) and names.is_alone(node):
        block = names.block(node)
        if isinstance(parent, ast.Module) or any(not isinstance(one, Import) for one in block):
            last = last_line_of(node)
            if isinstance(parent, Function) and not cell.lines[last + 1].strip():
                last += 1
            for line in range(line_of(node), last + 1):
                cell.delete_line(line)
            return
    first = id(parent) not in blocks and not isinstance(parent, ast.Module | Function)
    blocks.add(id(parent))
    cell.replace(*cell.bare_span(node), INSTEAD if first else "pass")


def _needed(names: NotebookNames, edits: Edits, cell: CodeCell) -> str:
    """The imports that the new code needs and the notebook does not have."""
    present = {
        (binding.name, binding.full)
        for bindings in names.scopes.globals.bindings.values()
        for binding in bindings
        if binding.full
        and binding.frame.cell.index <= cell.index
        and isinstance(binding.frame.node, ast.Module)
    }
    lines = []
    for name, full in MODULES.items():
        if name not in edits.modules:
            continue
        if edits.is_taken(name):
            lines.append(f"import {full}")
        elif (name, full) not in present:
            lines.append(f"import {full}" if name == full else f"import {full} as {name}")
    if edits.ddp and ("DDP", "torch.nn.parallel.DistributedDataParallel") not in present:
        lines.append(DDP)
    return "".join(f"{line}\n" for line in sorted(lines, key=lambda line: (line == DDP, line)))


def _helpers(edits: Edits) -> str:
    text = "\n\n".join(HELPERS[name] for name in HELPERS if name in edits.helpers)
    for name, spelled in edits.helpers.items():
        text = re.sub(rf"\b{name}\b", spelled, text)
    return text.replace("dist.", "torch.distributed.") if edits.is_taken("dist") else text


def _add(names: NotebookNames, cell: CodeCell, anchor: Import | None, edits: Edits) -> None:
    """Add imports, where one of torch_xla was if there is one, and helpers below all imports."""
    needed, helpers = _needed(names, edits, cell), _helpers(edits)
    body = cell.tree.body
    count = max(imports_at_top(body), body.index(anchor) + 1 if anchor in body else 0)
    if anchor is None and needed and count:
        anchor = next(one for one in body if isinstance(one, Import) and not _is_future(one))
    later = (one for one in body if not isinstance(one, ast.Pass) and not _is_future(one))
    first = next(later, None) if anchor is None else anchor
    if first is None:  # a cell of magics
        cell.insert_below(last_line_of(body[-1]), f"{needed}\n\n{helpers}".strip("\n"), "")
        return
    line = min(map(line_of, (first, *getattr(first, "decorator_list", ()))))
    if needed:
        cell.insert_text(line, needed)
        cell.note(line, f"added: {needed.strip()}".replace("\n", "; "))
    if helpers and count:
        last = last_line_of(body[count - 1])
        gap = "\n\n" if count < len(body) and cell.lines[last + 1].strip() else ""
        cell.insert_below(last, f"\n\n{helpers.rstrip()}{gap}", "")
    elif helpers:
        cell.insert_text(line, f"\n\n{helpers}\n\n" if needed else f"{helpers}\n\n")
    if helpers:
        cell.note(line, f"added: {', '.join(sorted(edits.helpers.values()))}")


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"
