"""List run folders and remove old ones: `tpunb runs`, `tpunb clean`, `%tpu_runs`."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpunb.runs import bucket_copies, directory, metrics, ownership, summary, tensorboard
from tpunb.runs.directory import RunDir
from tpunb.runs.labels import differing, short
from tpunb.runs.parameters import parameters
from tpunb.runs.result import STATE_STYLES
from tpunb.runs.spec import RunState
from tpunb.runs.state import read_result, read_spec, remembered, run_state
from tpunb.utils import env_vars, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import size_of
from tpunb.utils.terminal import Printable, Style, join, paint
from tpunb.utils.text import duration, excerpt, number, size

DAY = 86_400.0
NEWEST = 20
"""The number of runs that a table shows by default."""
_READ = 1_000_000
"""The most bytes of metrics that are read for a table; a run with more has no best value in it."""
_WIDE = 60
"""The most characters of a run's parameters in a table."""
_LONGEST = 100
"""The most characters of a failure in a table."""
_PARTS = frozenset(
    "spec.json script.py notebook.json notebook.ipynb env.json events.jsonl run.log attempts "
    "values.json values.pt given "
    "supervisor.log place.json hosts "
    "metrics.jsonl returns checkpoints stacks.txt running.lock stopping requests.jsonl "
    "chips.json upload.json profile result.json".split()
)
"""The entries of run folders, by which a folder that a crash has left without a spec is known."""


_chosen: Path | None = None
_bucket: str | None = None


def default_folder() -> Path:
    """Return the folder of runs: as chosen for this process, otherwise `./runs`."""
    return _chosen or Path.cwd() / "runs"


def choose_folder(folder: str) -> Path:
    """Choose the folder for the runs of this process from now on: `%tpu_setup --runs`.

    With a URL, runs are written to `./runs` and copied there (tpunb.runs.bucket_copies). Raises
    TpunbError for a URL that fsspec does not support, and for a folder of another
    user.
    """
    global _chosen, _bucket
    if bucket_copies.is_url(folder):
        bucket_copies.check_url(folder)
        _chosen, _bucket = Path.cwd() / "runs", folder
    else:
        chosen = Path(folder).expanduser().absolute()
        if chosen.is_dir():
            ownership.require_trusted(chosen)
        _chosen, _bucket = chosen, None
    return _chosen


def bucket() -> str | None:
    """Return the URL to which the runs of this process are copied; None if they are not."""
    return _bucket


@dataclass(frozen=True)
class StoredRun:
    """A run folder, with the run's state and times."""

    run: RunDir
    state: RunState
    cores: str
    took: str
    notebook: str
    """The name of its notebook's file; '' if it is not known."""
    failure: str
    """Why the run did not succeed; '' if it did, or is active."""
    started: float
    """Seconds since the epoch."""
    ended: float
    """Seconds since the epoch; for a run without a result, the last change of its folder."""

    @property
    def size(self) -> int:
        """The size of all its files in bytes."""
        return size_of(self.run.path)


def list_stored(runs: Path) -> list[StoredRun]:
    """Return all run folders, oldest first, including those that a crash has left half-written."""
    stored = []
    for path in directory.list_folders(runs):
        with contextlib.suppress(OSError):  # it was removed a moment ago
            if _is_run(path):
                stored.append(_inspect(RunDir(path)))
    return sorted(stored, key=lambda entry: (entry.started, entry.run.id))


def _is_run(path: Path) -> bool:
    """True for a run folder. There may be other folders: TensorBoard writes into `runs` too."""
    if (path / "spec.json").exists():
        return True
    if not directory.RUN_ID.match(path.name):
        return False
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    # The curves of a run; a folder with curves alone is of a program that calls TensorBoard.
    others = {name for name in names if not name.startswith(tensorboard.PREFIX)}
    return others <= _PARTS and (bool(others) or not names)


@remembered
def _inspect(run: RunDir) -> StoredRun:
    result = read_result(run)
    state = run_state(run) if result is None else result.state
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
    notebook = Path(str(records.read_dict(run.snapshot).get("path") or "")).name
    failed = result is not None and result.state is not RunState.SUCCEEDED
    failure = result.headline().partition("\n")[0] if result is not None and failed else ""
    return StoredRun(run, state, cores, took, notebook, failure, started, ended)


@dataclass(frozen=True, repr=False)
class RunTable(Printable):
    """A table of runs, newest first: text, and in a notebook HTML (tpunb.display.formatters)."""

    heads: tuple[str, ...]
    """The names of the columns that have a value for some run."""
    runs: Sequence[StoredRun]
    rows: Sequence[tuple[str, ...]]
    """For each run, its cells."""
    notes: Sequence[str]
    """Lines below the table."""

    @classmethod
    def of(
        cls,
        runs: Sequence[StoredRun],
        further: Mapping[str, Sequence[str]],
        notes: Sequence[str] = (),
    ) -> RunTable:
        """Return the table of these runs. `further`: columns with a cell for each run."""
        notebooks = [each.notebook for each in runs]
        columns = {
            "run": [each.run.id for each in runs],
            "state": [str(each.state) for each in runs],
            **further,
            "cores": [each.cores for each in runs],
            "time": [each.took for each in runs],
            "notebook": notebooks if len({*notebooks}) > 1 else [""] * len(runs),
            "failure": [excerpt(each.failure, _LONGEST) for each in runs],
        }
        columns = {head: cells for head, cells in columns.items() if any(cells)}
        return cls(tuple(columns), runs, [*zip(*columns.values(), strict=True)], notes)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        lines: list[str] = []
        for run, row in zip([None, *self.runs], [self.heads, *self.rows], strict=True):
            cells: list[str] = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            while cells and not cells[-1].strip():
                cells.pop()
            if cells:
                cells[-1] = cells[-1].rstrip()
            if run is None:
                lines.append(paint(join("  ", cells), Style.STRONG))
            else:
                cells[1] = paint(cells[1], STATE_STYLES[run.state], end=len(row[1]))
                lines.append(join("  ", cells))
        notes = self.notes if not self.runs else [paint(note, Style.FAINT) for note in self.notes]
        return join("\n", [*(lines if self.runs else ()), *notes])


def list_runs(runs: Path, *, whole: bool = False) -> RunTable:
    """Return a table of the newest runs in a folder, or of all with `whole`.

    It has the first metric's best value, the parameters that differ, or all if none does, and
    why runs failed.
    """
    stored = list_stored(runs)[::-1]
    listed = stored if whole else stored[:NEWEST]
    notes = [] if listed else [f"There are no runs in {directory.shown_place(runs)} yet."]
    if left_out := len(stored) - len(listed):
        notes.append(f"and {left_out} older: --all")
    if refused := directory.describe_refused(runs):
        notes.append(refused)
    further = {
        "best": [_best(each.run) for each in listed],
        "parameters": _describe_parameters(listed),
    }
    return RunTable.of(listed, further, notes)


def _best(run: RunDir) -> str:
    best = metrics.best_values(summary.read_steps(run, _READ))
    return f"{best[0].name} {number(best[0].value)}" if best else ""


def _describe_parameters(stored: list[StoredRun]) -> list[str]:
    """Return 'lr=0.1, depth=3' for each run, in one line."""
    given = [parameters(entry.run) for entry in stored]
    names = differing(given) or list(dict.fromkeys(name for values in given for name in values))
    return [
        excerpt(
            " ".join(", ".join(f"{n}={short(values[n])}" for n in names if n in values).split()),
            _WIDE,
        )
        for values in given
    ]


def find_old(runs: Path, older_than: float | None, keep: int) -> list[StoredRun]:
    """Return the runs to remove: ended or lost `older_than` days ago, except the `keep` newest.

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
    """Return the folder of checkpoints that a run resumed from; None without `--resume`."""
    folder: str | None = records.read_dict(run.env).get(env_vars.RESUME)
    return folder


def describe_removal(old: list[StoredRun]) -> str:
    """Describe the runs to remove and the space that this frees."""
    what = "1 run" if len(old) == 1 else f"{len(old)} runs"
    sizes = [entry.size for entry in old]
    return str(RunTable.of(old, {"size": [*map(size, sizes)]}, [f"{what}, {size(sum(sizes))}"]))


def remove_runs(old: list[StoredRun]) -> None:
    """Delete run folders, except of runs that are active by now.

    Raises TpunbError for a folder that cannot be deleted.
    """
    for entry in old:
        if run_state(entry.run).active:
            continue
        try:
            shutil.rmtree(entry.run.path)
        except OSError as error:
            raise TpunbError(f"cannot remove {entry.run.path}: {error.strerror}") from error
