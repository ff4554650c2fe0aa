"""`tpunb.runs()` and `tpunb.plot()`: runs side by side, read from their folders."""

from __future__ import annotations

import ast
import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb import best, control, figures, listings, records, rundir
from tpunb.errors import TpunbError
from tpunb.models import RunResult
from tpunb.rundir import RunDir

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_TAGS = ("parameters", "injected-parameters")
"""Papermill's: what the second assigns replaces what the first does."""


def runs(folder: Path | str | None = None) -> pd.DataFrame:
    """All runs in a folder, oldest first, a row each, by id: what they were given, what they made.

    Columns: `name`, `state`, `cores`, `device`, `started`, `duration` (seconds; so far, of one
    that goes on), then `params.*`, and of each metric `best.*`, or `last.*` where its name does
    not say whether less or more of it is better. `params` are the literals that the cells
    tagged `parameters` and `injected-parameters` assign, as for papermill; without such cells,
    those that the prelude assigns at its top level. `folder`: where `%tpu_setup --runs` says,
    or `runs` in the working directory.
    """
    import pandas as pd

    place = listings.default_folder() if folder is None else Path(folder)
    rows = {run.id: _row(run) for run in rundir.runs_in(place)}
    frame = pd.DataFrame.from_dict(rows, orient="index")
    fixed = ["name", "state", "cores", "device", "started", "duration"]
    groups = [[c for c in frame.columns if c.startswith(g)] for g in ("params.", "best.", "last.")]
    frame = frame.reindex(columns=[*fixed, *(name for group in groups for name in group)])
    frame["started"] = pd.to_datetime(frame["started"], unit="s")
    return frame.rename_axis("run")


def plot(*which: RunResult | str | pd.DataFrame, folder: Path | str | None = None) -> Figure:
    """A matplotlib figure with a panel for each metric, in it a line for each run.

    `which`: results, ids or parts of them, or rows of `tpunb.runs()`; without any, all runs of
    the folder that have logged something. Raises TpunbError for a run that is not there,
    MissingPackageError without matplotlib, ValueError where nothing was logged.
    """
    place = listings.default_folder() if folder is None else Path(folder)
    found = list(chosen(which, place))
    if not which:
        found = [run for run in rundir.runs_in(place) if run.metrics.exists()]
    return figures.panels(dict(zip(_labels(found), map(_metrics, found), strict=True)))


def chosen(which: Iterable[RunResult | str | pd.DataFrame], place: Path) -> Iterator[RunDir]:
    """The folders of runs that are given as results, ids or parts of them, or rows of `runs()`."""
    for one in which:
        if isinstance(one, RunResult):
            yield RunDir(one.dir)
        elif isinstance(one, str):
            yield rundir.find(place, one)
        else:
            yield from (rundir.find(place, str(id)) for id in one.index)


def _metrics(run: RunDir) -> pd.DataFrame:
    return records.frame(records.read(run.metrics), _started(run), reduced=True)


def _labels(found: list[RunDir]) -> list[str]:
    """What tells the runs apart in a legend: names, or parameters that differ, or ids."""
    names = [_name(run) for run in found]
    if len(set(names)) == len(names):
        return names
    given = [parameters(run) for run in found]
    every = list(dict.fromkeys(name for one in given for name in one))
    differ = [name for name in every if len({repr(one.get(name)) for one in given}) > 1]
    told = [", ".join(f"{name}={one.get(name)}" for name in differ) for one in given]
    return told if len(set(told)) == len(told) else [run.id for run in found]


def _name(run: RunDir) -> str:
    try:
        return control.read_spec(run).name
    except TpunbError:  # a crash has left half a file
        return run.id


def _started(run: RunDir) -> float:
    result = control.read_result(run)
    return run.spec.stat().st_mtime if result is None else result.started


def _row(run: RunDir) -> dict[str, Any]:
    state, result = control.state(run), control.read_result(run)
    row: dict[str, Any] = {"name": _name(run), "state": state, "started": _started(run)}
    if result is not None:
        row["duration"] = result.duration
    elif state in control.ALIVE:
        row["duration"] = time.time() - row["started"]
    with contextlib.suppress(TpunbError):  # of a lost run there may be no more than its folder
        spec = control.read_spec(run)
        row |= {"cores": spec.spmd or spec.world_size, "device": spec.device}
    row |= {f"params.{name}": value for name, value in parameters(run).items()}
    steps = records.of_all_ranks(records.read(run.metrics))
    for one in best.of(steps):
        row[f"{'last' if one.last else 'best'}.{one.name}"] = one.value
    return row


def parameters(run: RunDir) -> Mapping[str, Any]:
    """What its notebook was given: see `runs`."""
    try:
        snapshot = json.loads(run.snapshot.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a crash has left half a file, or none
        return {}
    code = [cell for cell in snapshot["cells"] if cell["kind"] == "code"]
    tagged = [cell for cell in code if set(cell["tags"]) & set(_TAGS)]
    above = [
        cell for cell in code if snapshot["train"] is None or cell["index"] < snapshot["train"]
    ]
    found: dict[str, Any] = {}
    for cell in tagged or above:
        found |= _literals(cell["source"])
    return found


def _literals(source: str) -> dict[str, Any]:
    """The names to which a cell assigns literals that fit into a table, at its top level."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # a magic of IPython's
        return {}
    found: dict[str, Any] = {}
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
        if isinstance(value, (bool, int, float, str, type(None))):
            found[targets[0].id] = value
    return found
