"""Listings of run folders, and which of them are old, for the magics and the command line alike."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tpunb import control
from tpunb.data.room import size
from tpunb.display.status import span
from tpunb.errors import TpunbError
from tpunb.platforms.resources import size_of
from tpunb.rundir import RunDir

DAY = 86_400.0
_ID = re.compile(r"\d{8}-\d{6}-.")
_PARTS = frozenset(
    "spec.json script.py notebook.json notebook.ipynb env.json events.jsonl run.log attempts "
    "metrics.jsonl returns checkpoints stacks.txt running.lock stopping requests.jsonl "
    "result.json".split()
)
"""What is in run folders. A folder that a crash has left without its spec is known by them."""


_chosen: Path | None = None


def default_folder() -> Path:
    """Where runs are kept: where this process was told, or `runs` in the working directory."""
    return Path.cwd() / "runs" if _chosen is None else _chosen


def choose_folder(folder: str) -> Path:
    """Keep the runs of this process elsewhere from now on: `%tpu_setup --runs`."""
    global _chosen
    _chosen = Path(folder).expanduser().absolute()
    return _chosen


@dataclass(frozen=True)
class Kept:
    """A run folder, and what can be said of it."""

    run: RunDir
    state: str
    """See `control.state`."""
    cores: str
    took: str
    started: float
    """Seconds since the epoch."""
    ended: float
    """The same; of a run that has no end, when its folder was last changed."""
    size: int
    """Bytes of all its files."""

    @property
    def alive(self) -> bool:
        return self.state in control.ALIVE


def kept(runs: Path) -> list[Kept]:
    """All run folders, oldest first, also those that a crash has left half-written."""
    found = [_look(RunDir(path)) for path in (runs.iterdir() if runs.is_dir() else ())
             if _is_run(path)]  # fmt: skip
    return sorted(found, key=lambda one: (one.started, one.run.id))


def _is_run(path: Path) -> bool:
    """Whether a folder is a run's. `runs` may have others: TensorBoard writes there too."""
    if path.is_symlink() or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
        return False
    if (path / "spec.json").exists():
        return True
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    return bool(_ID.match(path.name)) and names <= _PARTS


def _look(run: RunDir) -> Kept:
    state, result = control.state(run), control.read_result(run)
    changed = run.path.stat().st_mtime
    started = run.spec.stat().st_mtime if run.spec.exists() else changed
    try:
        spec = control.read_spec(run)
        cores = f"{spec.spmd or spec.world_size} {spec.device}"
    except TpunbError:
        cores = "?"
    if result is not None:
        took = span(result.duration)
    else:
        took = span(time.time() - started) if state in control.ALIVE else "?"
    ended = changed if result is None else result.ended
    return Kept(run, state, cores, took, started, ended, size_of(run.path))


def table(runs: Path) -> str:
    """All runs in a folder, oldest first, as a table."""
    rows = kept(runs)
    return _table(rows) if rows else f"There are no runs in {runs} yet."


def _table(found: list[Kept]) -> str:
    rows = [("run", "state", "cores", "time", "started", "size")]
    for one in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started))
        rows.append((one.run.id, one.state, one.cores, one.took, when, size(one.size)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def old(runs: Path, older_than: float | None, keep: int) -> list[Kept]:
    """The runs that may go: ended or lost, `older_than` days ago, without the `keep` newest.

    One from whose checkpoints a living run goes on (`--resume`) stays.
    """
    found = kept(runs)
    needed = {_resumes(one.run) for one in found if one.alive}
    ended = [one for one in found if not one.alive and str(one.run.checkpoints) not in needed]
    ended = ended[: max(0, len(ended) - keep)]
    if older_than is None:
        return ended
    return [one for one in ended if time.time() - one.ended >= older_than * DAY]


def _resumes(run: RunDir) -> str | None:
    """Where `--resume` lets it find checkpoints."""
    env = json.loads(run.env.read_text(encoding="utf-8")) if run.env.exists() else {}
    found: str | None = env.get("TPUNB_RESUME")
    return found


def listing(found: list[Kept]) -> str:
    """What would go, and how much room that makes."""
    what = "1 run" if len(found) == 1 else f"{len(found)} runs"
    return f"{_table(found)}\n{what}, {size(sum(one.size for one in found))}"


def remove(found: list[Kept]) -> None:
    """Delete run folders. One that goes on by now is left, whatever it was before.

    Raises TpunbError for one that cannot be deleted.
    """
    for one in found:
        if control.state(one.run) in control.ALIVE:
            continue
        try:
            shutil.rmtree(one.run.path)
        except OSError as error:
            raise TpunbError(f"cannot remove {one.run.path}: {error.strerror}") from error
