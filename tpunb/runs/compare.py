"""`tpunb.runs()` and `tpunb.plot()`: compare runs, read from their folders."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.runs import directory, listing, metrics, summary
from tpunb.runs.directory import RunDir
from tpunb.runs.parameters import differing, parameters
from tpunb.runs.result import RunResult
from tpunb.runs.state import read_result, read_spec, run_state
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


def runs(folder: Path | str | None = None) -> pd.DataFrame:
    """Return a table of the runs in a folder, oldest first: state, parameters and best metrics.

    The index is the run's id. Columns: `name`, `state`, `cores`, `device`, `started` (UTC),
    `duration` (seconds; so far for an active run), `resumed_from` (of `--resume`), `notebook` (its
    file), then `params.*`, and for each metric `best.*`, or `last.*` if its name does not show
    whether lower or higher is better. For a run with more than 20 MB of metrics these are left
    out, and a UserWarning names it. `params`: see `tpunb.runs.parameters.parameters`.

    `folder`: by default the one that `%tpu_setup --runs` set, or `runs` in the working directory.
    Raises TpunbError if it cannot be read.
    """
    import pandas as pd

    place = listing.default_folder() if folder is None else Path(folder)
    rows: dict[str, dict[str, Any]] = {}
    for run in directory.list_runs(place):
        with contextlib.suppress(OSError):  # it was removed a moment ago
            rows[run.id] = _row(run)
    unread = [id for id, row in rows.items() if row.pop("unread", False)]
    if unread:
        warnings.warn(
            f"no best values for {', '.join(unread)}: more than {size(summary.READ)} of metrics. "
            "tpunb.plot() draws a part of them",
            stacklevel=2,
        )
    frame = pd.DataFrame.from_dict(rows, orient="index")
    fixed = ["name", "state", "cores", "device", "started", "duration"]
    fixed += ["resumed_from", "notebook"]
    groups = [[c for c in frame.columns if c.startswith(g)] for g in ("params.", "best.", "last.")]
    frame = frame.reindex(columns=[*fixed, *(name for group in groups for name in group)])
    frame["started"] = pd.to_datetime(frame["started"], unit="s", errors="coerce").dt.floor("s")
    return frame.rename_axis("run")


def plot(*which: RunResult | str | pd.DataFrame, folder: Path | str | None = None) -> Figure:
    """Return a matplotlib figure with a panel for each metric and a line for each run.

    `which`: results, ids or parts of ids, or rows of `tpunb.runs()`; by default all runs in the
    folder that have logged something. Raises TpunbError for a run that does not exist,
    MissingPackageError without matplotlib, ValueError if nothing was logged.
    """
    from tpunb.runs import figures

    place = listing.default_folder() if folder is None else Path(folder)
    selected = list(find_selected(which, place))
    if not which:
        selected = [run for run in directory.list_runs(place) if run.metrics.exists()]
    for run in selected:
        metrics.warn_if_spread(run.metrics, metrics.DRAWN)
    return figures.panels(dict(zip(_labels(selected), map(_metrics, selected), strict=True)))


def find_selected(which: Iterable[RunResult | str | pd.DataFrame], place: Path) -> Iterator[RunDir]:
    """Yield the folders of runs selected by results, ids or parts of ids, or rows of `runs()`."""
    for selection in which:
        if isinstance(selection, RunResult):
            yield RunDir(selection.dir)
        elif isinstance(selection, str):
            yield directory.find_run(place, selection)
        else:
            yield from (directory.find_run(place, str(id)) for id in selection.index)


def _metrics(run: RunDir) -> pd.DataFrame:
    rows = metrics.read_rows(run.metrics, metrics.DRAWN)
    return metrics.to_frame(rows, _started(run), reduced=True, whole=True)


def _labels(runs: list[RunDir]) -> list[str]:
    """Return labels for a legend: names if they are unique, otherwise parameters, otherwise ids."""
    names = [_name(run) for run in runs]
    if len(set(names)) == len(names):
        return names
    given = [parameters(run) for run in runs]
    differ = differing(given)
    labels = [", ".join(f"{name}={values.get(name)}" for name in differ) for values in given]
    return labels if len(set(labels)) == len(labels) else [run.id for run in runs]


def _name(run: RunDir) -> str:
    try:
        return read_spec(run).name
    except TpunbError:  # a crash has left half a file
        return run.id


def _started(run: RunDir) -> float:
    result = read_result(run)
    return run.spec.stat().st_mtime if result is None else result.started


def _row(run: RunDir) -> dict[str, Any]:
    state, result = run_state(run), read_result(run)
    row: dict[str, Any] = {"name": _name(run), "state": str(state), "started": _started(run)}
    if result is not None:
        row["duration"] = result.duration
    elif state.active:
        row["duration"] = time.time() - row["started"]
    with contextlib.suppress(TpunbError):  # a lost run may have left only its folder
        spec = read_spec(run)
        row |= {"cores": spec.spmd or spec.world_size, "device": spec.device}
        row["resumed_from"] = spec.resumed_from
    row["notebook"] = records.read_dict(run.snapshot).get("path")
    row |= {f"params.{name}": value for name, value in parameters(run).items()}
    if summary.has_more(run):
        row["unread"] = True
    for best in metrics.best_values(summary.read_steps(run)):
        row[f"{'last' if best.last else 'best'}.{best.name}"] = best.value
    return row
