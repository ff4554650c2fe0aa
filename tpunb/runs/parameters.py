"""The parameters of a run: literals that its cells assign, and values from the kernel.

Standard library only, because the supervisor writes them into `result.json`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.utils import records
from tpunb.utils.secrets import is_secret_name, is_secret_text

TAGS = frozenset(("parameters", "injected-parameters"))
"""papermill's tags: assignments in cells with the second tag replace those with the first."""


@dataclass(frozen=True)
class _SnapshotCell:
    """The fields that are read of a `tpunb.notebook.models.Cell`."""

    index: int
    kind: str
    source: str
    tags: tuple[str, ...]


@dataclass(frozen=True)
class _Snapshot:
    """The fields that are read of a `tpunb.notebook.models.Snapshot`."""

    cells: tuple[_SnapshotCell, ...]
    train: int | None


def parameters(run: RunDir) -> Mapping[str, Any]:
    """Return the parameters of a run by name: numbers, strings, booleans and None.

    They are the literals assigned in cells tagged `parameters` or `injected-parameters`, as for
    papermill; without such cells, those assigned at the top level of the prelude, also to
    attributes and items ('config.lr'). The last assignment above the train cell counts. Values that
    the run has from the kernel, and arguments of a function that `tpunb.launch` calls take
    precedence. Possible secrets are left out.
    """
    return {**_of_cells(run), **records.read_dict(run.values)}


def _of_cells(run: RunDir) -> Mapping[str, Any]:
    try:
        snapshot = records.build(_Snapshot, records.read(run.snapshot))
    except (OSError, ValueError):  # there is none, or a crash has left half a file
        return {}
    code = [cell for cell in snapshot.cells if cell.kind == "code"]
    above = [cell for cell in code if snapshot.train is None or cell.index < snapshot.train]
    tagged = [cell for cell in code if set(cell.tags) & TAGS]
    assigned = _literals(cell.source for cell in above)
    if not tagged:
        return assigned
    named = _literals(cell.source for cell in tagged)
    return {name: assigned.get(name, value) for name, value in named.items()}


def _literals(sources: Iterable[str]) -> dict[str, Any]:
    """Return the names that cells assign at their top level, each with its last scalar literal."""
    literals: dict[str, Any] = {}
    for source in sources:
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError):  # a magic of IPython's
            continue
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            if len(targets) != 1 or not isinstance(targets[0], ast.Name):
                continue
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            assert node.value is not None
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError):  # an expression
                continue
            name = targets[0].id
            if isinstance(value, str) and (is_secret_name(name) or is_secret_text(value)):
                continue
            if isinstance(value, (bool, int, float, str, type(None))):
                literals[name] = value
    return literals
