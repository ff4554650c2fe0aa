"""Listings of runs and their logs, for the magics and the command line alike."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tpunb import rundir
from tpunb.display.status import span
from tpunb.errors import TpunbError
from tpunb.rundir import RunDir


def default_folder() -> Path:
    """Where runs are kept if nobody says otherwise: `runs` in the working directory."""
    return Path.cwd() / "runs"


def table(runs: Path) -> str:
    """All runs in a folder, oldest first, as a table."""
    rows = [("run", "state", "cores", "time", "started")]
    for run in rundir.runs_in(runs):
        spec, result = run.read_spec(), run.read_result()
        started = run.spec.stat().st_mtime
        if result is not None:
            state, took = str(result.state), span(result.duration)
        elif run.is_running():
            state, took = "running", span(time.time() - started)
        else:
            state, took = "lost", "?"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(started))
        rows.append((run.id, state, f"{spec.world_size} {spec.device}", took, when))
    if len(rows) == 1:
        return f"There are no runs in {runs} yet."
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def log(run: RunDir, rank: int | None = None, tail: int | None = None) -> str:
    """The log of a run, or of one rank of it, or the last lines of either.

    Raises TpunbError for a rank that the run has not.
    """
    if rank is not None and rank >= (size := run.read_spec().world_size):
        raise TpunbError(f"run {run.id} has no rank {rank}: its ranks are 0 to {size - 1}")
    text = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
    lines = text.removesuffix("\n").split("\n") if text else []
    if rank is not None:
        mine = re.compile(rf"\[{rank}( err| prelude)?\] ")
        lines = [line for line in lines if mine.match(line)]
    if tail is not None:
        lines = lines[-tail:] if tail else []
    return "".join(f"{line}\n" for line in lines)
