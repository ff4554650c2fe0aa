"""Rewrite a notebook of torch_xla for TorchTPU."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpunb.notebook.migrate.cell import CodeCell, last_line_of
from tpunb.notebook.migrate.names import ROOTS, NotebookNames
from tpunb.notebook.migrate.report import Change, Migration, cell_labels, source_like, text_of
from tpunb.notebook.migrate.rewrites.training import make_training
from tpunb.notebook.migrate.statements import Removals
from tpunb.notebook.migrate.torchtpu.calls import rewrite_uses
from tpunb.notebook.migrate.torchtpu.edits import Edits
from tpunb.notebook.migrate.torchtpu.helpers import ON_CPU
from tpunb.notebook.migrate.torchtpu.imports import Import, imports_at_top, rewrite_imports
from tpunb.notebook.migrate.torchtpu.setup import (
    GROUP,
    mark_rest,
    remove_variables,
    rewrite_commands,
    rewrite_strings,
)
from tpunb.notebook.migrate.torchtpu.steps import unindent_steps
from tpunb.notebook.migrate.torchtpu.where import RankCode

BOTH = "cpu:gloo,tpu:tpu_dist"
"""The backend of a group that also takes tensors and objects of the CPU."""
LAUNCHES = {"torch_xla.launch"}


def to_torchtpu(original: Mapping[str, Any], notebook: dict[str, Any], train: bool) -> Migration:
    """Rewrite `notebook`, a copy of `original`: see `migrate`."""
    changes: list[Change] = []
    added: frozenset[int] = frozenset()
    if train or _launches(notebook):
        changes, added = make_training(notebook)
    cells = [
        CodeCell(index, text_of(cell))
        for index, cell in enumerate(notebook["cells"])
        if cell.get("cell_type") == "code"
    ]
    programs = [[cell for cell in cells if not cell.file]]
    programs += [[cell] for cell in cells if cell.file]
    before = {cell.index: cell.text for cell in cells}
    labels = cell_labels(notebook)
    made: list[Change] = []
    left: list[str] = []
    for program in programs:
        texts, new = _rewrite(program, script=program[0].file if program else False)
        made += new
        for cell in program:
            node = notebook["cells"][cell.index]
            if texts[cell.index] != cell.text:
                node["source"] = source_like(node, texts[cell.index])
        left += _left([CodeCell(index, text) for index, text in texts.items()], labels)
    changes += _in_original(made, original, before, added)
    return Migration(notebook, tuple(changes), original, added, tuple(dict.fromkeys(left)))


def _launches(notebook: Mapping[str, Any]) -> bool:
    cells = [
        CodeCell(index, text_of(cell))
        for index, cell in enumerate(notebook["cells"])
        if cell.get("cell_type") == "code"
    ]
    names = NotebookNames([cell for cell in cells if not cell.file])
    return any(names.current_names(site.call.func) & LAUNCHES for site in names.scopes.calls)


def _rewrite(program: Sequence[CodeCell], *, script: bool) -> tuple[dict[int, str], list[Change]]:
    """Return the new texts of the cells of one program, and the changes."""
    cells, empty = unindent_steps(program)
    names = NotebookNames(cells)
    edits = Edits(names, RankCode(names, script=script))
    removals = Removals(names)
    remove_variables(edits, removals)
    rewrite_uses(edits)
    group = BOTH if edits.helpers.keys() & ON_CPU else GROUP
    rewrite_strings(edits, group)
    rewrite_commands(edits)
    _start_groups(edits, group)
    edits.drop_all(removals)
    removals.apply()
    for cell in cells:
        for line in empty.get(cell.index, ()):
            cell.delete_line(line)
            before = next(old.lines[line] for old in program if old.index == cell.index)
            what = "removed: TorchTPU runs each operation at once"
            cell.note(line, what, before=before.strip() or "with torch_xla.step():")
        if not cell.python:
            mark_rest(cell)
    rewritten = [CodeCell(cell.index, cell.result()) for cell in cells]
    rewrite_imports(rewritten, edits)
    changes = [change for cell in cells for change in cell.changes]
    for old, new in zip(cells, rewritten, strict=True):
        changes += (
            replace(change, line=_line_in(old.text, new.text, change.line))
            for change in new.changes
            if change.kind == "rewritten"
        )
    changes.sort(key=lambda change: (change.cell, change.line))
    return {cell.index: cell.result() for cell in rewritten}, changes


def _start_groups(edits: Edits, group: str) -> None:
    """Start a process group in each train cell, or where a script starts its ranks."""
    names, code = edits.names, edits.code
    if not code.starts or "dist" not in edits.modules or code.has_group:
        return
    text = f'{edits.module("dist")}.init_process_group("{group}")'
    for index in sorted(code.trains | {at for _, at in edits.launches}):
        cell = names.cells[index]
        launches = [line for line, at in edits.launches if at == index]
        if cell.file and launches:
            cell.insert_above(min(launches), text)
        elif count := imports_at_top(cell.tree.body):
            _append(cell, last_line_of(cell.tree.body[count - 1]), f"\n{text}")
        elif cell.tree.body:
            _append(cell, names.line(cell.tree.body[0]) - 1, text)
        cell.note(min(launches, default=0), f"added: {text}")


def _append(cell: CodeCell, line: int, text: str) -> None:
    """Insert lines below a line, above everything that other rewrites insert there."""
    cell.insert(cell.line_span(line)[1], f"\n{text}")


def _left(cells: Sequence[CodeCell], labels: Sequence[str]) -> list[str]:
    """The names of torch_xla in cells that are rewritten, each with its cell."""
    names = NotebookNames(cells)
    left = []
    covered: set[ast.AST] = set()
    for cell, node in names.walk():
        if isinstance(node, Import):
            module = getattr(node, "module", None)
            fulls = [f"{module}.{a.name}" if module else a.name for a in node.names]
        elif isinstance(node, ast.Name | ast.Attribute) and node not in covered:
            fulls = sorted(names.full_names(node))
            covered |= set(ast.walk(node))
        else:
            continue
        known = [full for full in fulls if full.partition(".")[0] in ROOTS]
        left += [f"{full} ({labels[cell.index]})" for full in known]
    for cell in cells:
        if not cell.python and any(f"{root}" in cell.text for root in ROOTS):
            left.append(f"torch_xla ({labels[cell.index]}, which is not Python)")
    return left


def _in_original(
    changes: Sequence[Change],
    original: Mapping[str, Any],
    before: Mapping[int, str],
    added: frozenset[int],
) -> list[Change]:
    """Give changes the places that their lines had before cells were added and got magics.

    `before`: the texts to whose lines they refer, by the index of the cell.
    """
    kept = [at for at in range(len(original["cells"]) + len(added)) if at not in added]
    placed = []
    for change in changes:
        old = next(number for number, at in enumerate(kept) if at >= change.cell)
        line = _line_in(text_of(original["cells"][old]), before[change.cell], change.line)
        placed.append(replace(change, cell=old, line=line))
    return placed


def _line_in(old: str, new: str, line: int) -> int:
    """The line of a text that became a line of another one, both from 1."""
    if old == new:
        return line
    matcher = difflib.SequenceMatcher(None, new.split("\n"), old.split("\n"), autojunk=False)
    for _, start, end, first, last in matcher.get_opcodes():
        if start <= line - 1 < end:
            return min(first + line - 1 - start, max(last - 1, first)) + 1
    return 1
