"""Lists of run folders, and removal of old ones: `tpunb runs`, `tpunb clean`, `%tpu_runs`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpunb.runs import directory, download, metrics, summary, upload
from tpunb.runs.directory import RunDir
from tpunb.runs.parameters import parameters
from tpunb.runs.result import STATE_STYLES
from tpunb.runs.spec import RunState
from tpunb.runs.state import read_result, read_spec, run_state
from tpunb.utils import env_vars, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import size_of
from tpunb.utils.terminal import Style, join, paint
from tpunb.utils.text import date_and_time, duration, excerpt, size

DAY = 86_400.0
NEWEST = 20
"""Runs that a table shows, if not all are asked for."""
_READ = 1_000_000
"""Bytes of metrics that are read for it; of a run with more, the best value is left out."""
_WIDE = 60
"""Characters of a run's parameters."""
_ID = re.compile(r"\d{8}-\d{6}-.")
_PARTS = frozenset(
    "spec.json script.py notebook.json notebook.ipynb env.json events.jsonl run.log attempts "
    "kernel_values.json parameters.json "
    "metrics.jsonl returns checkpoints stacks.txt running.lock stopping requests.jsonl "
    "chips.json upload.json copied.json profile result.json".split()
)
"""What is in run folders: a folder without a spec, as a crash leaves it, is recognised by them."""


_chosen: Path | None = None
_bucket: str | None = None


def default_folder() -> Path:
    """Where runs are kept: where this process or its sweep was told, or `runs` in the working
    directory.
    """
    if _chosen is not None:
        return _chosen
    return Path(os.environ.get(env_vars.RUNS) or Path.cwd() / "runs")


def choose_folder(folder: str) -> Path:
    """Keep the runs of this process elsewhere from now on: `%tpu_setup --runs`.

    A URL: in `runs` here first, and copied there (tpunb.runs.upload). Raises TpunbError for one
    that fsspec does not know.
    """
    global _chosen, _bucket
    if download.is_url(folder):
        upload.check_url(folder)
        _chosen, _bucket = Path.cwd() / "runs", folder
    else:
        _chosen, _bucket = Path(folder).expanduser().absolute(), None
    return _chosen


def bucket() -> str | None:
    """The URL to which the runs of this process are copied; None: nowhere."""
    return _bucket


@dataclass(frozen=True)
class StoredRun:
    """A run folder and what is known about it."""

    run: RunDir
    state: RunState
    cores: str
    took: str
    started: float
    """Seconds since the epoch."""
    ended: float
    """The same; for a run without a result, when its folder was last changed."""

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return size_of(self.run.path)


def list_stored(runs: Path) -> list[StoredRun]:
    """All run folders, oldest first, also those that a crash has left half-written."""
    stored = []
    for path in directory.list_folders(runs):
        with contextlib.suppress(OSError):  # it was removed a moment ago
            if _is_run(path):
                stored.append(_inspect(RunDir(path)))
    return sorted(stored, key=lambda entry: (entry.started, entry.run.id))


def _is_run(path: Path) -> bool:
    """True for a run folder. `runs` may hold others: TensorBoard writes there too."""
    if (path / "spec.json").exists():
        return True
    if not _ID.match(path.name):
        return False
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    return names <= _PARTS


def _inspect(run: RunDir) -> StoredRun:
    state, result = run_state(run), read_result(run)
    changed = run.path.stat().st_mtime
    started = run.spec.lstat().st_mtime if run.spec.exists() else changed
    try:
        spec = read_spec(run)
        cores = f"{spec.spmd or spec.world_size} {spec.device}"
        cores += f" on {spec.place}" if spec.place else ""
    except TpunbError:
        cores = "?"
    if result is not None:
        took = duration(result.duration)
    else:
        took = duration(time.time() - started) if state.active else "?"
    ended = changed if result is None else result.ended
    return StoredRun(run, state, cores, took, started, ended)


def format_table(runs: Path, *, whole: bool = False) -> str:
    """The newest runs in a folder, or the `whole` of them, newest first, as a table.

    With the first metric's best value, and the parameters: those that differ, if any do.
    """
    stored = list_stored(runs)[::-1]
    listed = stored if whole else stored[:NEWEST]
    lines: list[str] = [f"There are no runs in {runs} yet."]
    if listed:
        given = _describe_parameters(listed)
        further = [(_best(entry.run), text) for entry, text in zip(listed, given, strict=True)]
        lines = [_format_rows(listed, ("best", "parameters"), further)]
    if left_out := len(stored) - len(listed):
        lines.append(paint(f"and {left_out} older: --all", Style.FAINT))
    if refused := directory.describe_refused(runs):
        lines.append(paint(refused, Style.FAINT))
    return join("\n", lines)


def _best(run: RunDir) -> str:
    best = metrics.best_values(summary.read_steps(run, _READ))
    return f"{best[0].name} {best[0].value:.4g}" if best else ""


def _describe_parameters(stored: list[StoredRun]) -> list[str]:
    """'lr=0.1, depth=3' of each run."""
    given = [parameters(entry.run) for entry in stored]
    names = list(dict.fromkeys(name for values in given for name in values))
    differ = [name for name in names if len({repr(values.get(name)) for values in given}) > 1]
    return [
        excerpt(", ".join(f"{n}={values[n]}" for n in differ or names if n in values), _WIDE)
        for values in given
    ]


def _format_rows(
    stored: list[StoredRun], heads: tuple[str, ...], further: Sequence[tuple[str, ...]]
) -> str:
    """`further`: of each run, what stands below `heads`, to the right of what every table has."""
    rows = [("run", "state", "cores", "time", "started", *heads)]
    for entry, more in zip(stored, further, strict=True):
        when = date_and_time(entry.started)
        rows.append((entry.run.id, str(entry.state), entry.cores, entry.took, when, *more))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, listed in zip(rows, [None, *stored], strict=True):
        columns: list[str] = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        columns[-1] = columns[-1].rstrip()
        if listed is not None:
            columns[1] = paint(columns[1], STATE_STYLES[listed.state], end=len(row[1]))
        line = join("  ", columns)
        lines.append(line if listed is not None else paint(line, Style.STRONG))
    return join("\n", lines)


def find_old(runs: Path, older_than: float | None, keep: int) -> list[StoredRun]:
    """The runs to remove: ended or lost, `older_than` days ago, without the `keep` newest.

    A run from whose checkpoints an active run continues (`--resume`) is kept.
    """
    stored = list_stored(runs)
    needed = {_resumed_from(entry.run) for entry in stored if entry.state.active}
    ended = [
        entry
        for entry in stored
        if not entry.state.active and str(entry.run.checkpoints) not in needed
    ]
    ended = ended[: max(0, len(ended) - keep)]
    if older_than is None:
        return ended
    return [entry for entry in ended if time.time() - entry.ended >= older_than * DAY]


def _resumed_from(run: RunDir) -> str | None:
    """The folder of checkpoints that `--resume` gave it."""
    folder: str | None = records.read_dict(run.env).get(env_vars.RESUME)
    return folder


def describe_removal(old: list[StoredRun]) -> str:
    """What would be removed, and how much room that makes."""
    what = "1 run" if len(old) == 1 else f"{len(old)} runs"
    sizes = [entry.size for entry in old]
    table = _format_rows(old, ("size",), [(size(of_run),) for of_run in sizes])
    return f"{table}\n{what}, {size(sum(sizes))}"


def remove_runs(old: list[StoredRun]) -> None:
    """Delete run folders, but not one that is active by now.

    Raises TpunbError for one that cannot be deleted.
    """
    for entry in old:
        if run_state(entry.run).active:
            continue
        try:
            shutil.rmtree(entry.run.path)
        except OSError as error:
            raise TpunbError(f"cannot remove {entry.run.path}: {error.strerror}") from error
