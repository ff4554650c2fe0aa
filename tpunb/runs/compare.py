"""`tpunb.runs()` and `tpunb.plot()`: compare runs, read from their folders."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.runs import directory, last_run, listing, metrics, summary
from tpunb.runs.directory import RunDir
from tpunb.runs.labels import label_runs
from tpunb.runs.parameters import parameters
from tpunb.runs.result import RunResult
from tpunb.runs.state import read_result, read_spec, remembered, run_state
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import size

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


_READ = 200_000
"""The most bytes of a run's metrics that are read for their names."""


def runs(folder: Path | str | None = None) -> pd.DataFrame:
    """Return a table of the runs in a folder, newest first: state, parameters and best metrics.

    The index is the run's id. Columns: `name`, `state`, `duration` (seconds; so far for an active
    run), `params.*` (see `tpunb.runs.parameters.parameters`), and for each metric `best.*`, or
    `last.*` if its name does not show whether lower or higher is better; `cores`, `device`,
    `started` (UTC), `resumed_from` (of `--resume`), `notebook` (its file). The metrics of a run
    with more than 20 MB of them are left out, and a UserWarning names it.

    `folder`: by default the one that `%tpu_setup --runs` set, or `runs` in the working directory.
    Raises TpunbError if it cannot be read.
    """
    import pandas as pd

    place = listing.default_folder() if folder is None else Path(folder)
    rows: dict[str, dict[str, Any]] = {}
    for run in reversed(directory.list_runs(place)):
        with contextlib.suppress(OSError):  # it was removed a moment ago
            rows[run.id] = dict(_row(run))
    unread = [id for id, row in rows.items() if row.pop("unread", False)]
    if unread:
        warnings.warn(
            f"no best values for {', '.join(unread)}: more than {size(summary.READ)} of metrics. "
            "tpunb.plot() draws a part of them",
            stacklevel=2,
        )
    frame = pd.DataFrame.from_dict(rows, orient="index")
    own = [[c for c in frame.columns if c.startswith(g)] for g in ("params.", "best.", "last.")]
    fixed = ["cores", "device", "started", "resumed_from", "notebook"]
    columns = ["name", "state", "duration", *(name for group in own for name in group), *fixed]
    frame = frame.reindex(columns=columns)
    frame["started"] = pd.to_datetime(frame["started"], unit="s", errors="coerce").dt.floor("s")
    return frame.rename_axis("run")


def plot(*which: RunResult | str | pd.DataFrame, folder: Path | str | None = None) -> Figure:
    """Return a matplotlib figure with a panel for each metric and a line for each run.

    `which`: results, ids or parts of ids, rows of `tpunb.runs()`, names of metrics; by default all
    metrics of the runs of this notebook (that of the last run) in the folder. Lines are labelled by
    what differs between the runs. Raises TpunbError for a name that no run or metric has,
    MissingPackageError without matplotlib, ValueError if nothing was logged.
    """
    from tpunb.runs import figures

    place = listing.default_folder() if folder is None else Path(folder)
    logged = [run for run in directory.list_runs(place) if run.metrics.exists()]
    wanted = [each for each in which if isinstance(each, str)]
    names = {run.id: _metric_names(run) for run in logged} if wanted else {}
    known: set[str] = set().union(*names.values())
    drawn = [each for each in wanted if each in known]
    for each in wanted:
        if each not in known and not any(each in run.id for run in directory.list_runs(place)):
            raise TpunbError(
                f"no run in {place} has {each!r} in its id, or a metric of that name; "
                f"the metrics are: {', '.join(sorted(known)) or 'none'}"
            )
    chosen = [each for each in which if not (isinstance(each, str) and each in known)]
    selected = list(find_selected(chosen, place)) or [
        run for run in _of_this_notebook(logged) if not drawn or names[run.id] & {*drawn}
    ]
    for run in selected:
        metrics.warn_if_spread(run.metrics, metrics.DRAWN)
    labels = label_runs([(_name(run), parameters(run), run.id) for run in selected])
    frames = dict(zip(labels, map(_metrics, selected), strict=True))
    if missing := [name for name in drawn if not any(name in frame for frame in frames.values())]:
        raise ValueError(f"none of these runs has logged {', '.join(missing)}")
    return figures.panels(frames, drawn)


def _of_this_notebook(logged: list[RunDir]) -> list[RunDir]:
    """Return the runs of the notebook of this process's last run, otherwise of the newest run."""
    last = last_run.result
    latest = RunDir(last.dir) if isinstance(last, RunResult) else logged[-1] if logged else None
    own = [run for run in logged if latest is not None and _notebook(run) == _notebook(latest)]
    return own or logged


def _notebook(run: RunDir) -> str | None:
    path: str | None = records.read_dict(run.snapshot).get("path")
    return path


def _metric_names(run: RunDir) -> set[str]:
    """Return the names of a run's metrics; of a large file, parts are read."""
    rows = metrics.read_rows(run.metrics, _READ)
    return {name for row in rows for name in metrics.values_of(row)}


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


def _name(run: RunDir) -> str:
    try:
        return read_spec(run).name
    except TpunbError:  # a crash has left half a file
        return run.id


def _started(run: RunDir) -> float:
    result = read_result(run)
    return run.spec.stat().st_mtime if result is None else result.started


@remembered
def _row(run: RunDir) -> dict[str, Any]:
    result = read_result(run)
    state = run_state(run) if result is None else result.state
    started = run.spec.stat().st_mtime if result is None else result.started
    row: dict[str, Any] = {"name": run.id, "state": str(state), "started": started}
    if result is not None:
        row["duration"] = result.duration
    elif state.active:
        row["duration"] = time.time() - started
    with contextlib.suppress(TpunbError):  # a crash has left half a file
        spec = read_spec(run)
        row |= {"name": spec.name, "cores": spec.spmd or spec.world_size, "device": spec.device}
        row["resumed_from"] = spec.resumed_from
    row["notebook"] = _notebook(run)
    row |= {f"params.{name}": value for name, value in parameters(run).items()}
    if summary.has_more(run):
        row["unread"] = True
    for best in metrics.best_values(summary.read_steps(run)):
        row[f"{'last' if best.last else 'best'}.{best.name}"] = best.value
    return row
