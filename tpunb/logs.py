"""The log of a run, of all its ranks or of one, for the magics and the command line alike."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from tpunb import control
from tpunb.errors import TpunbError
from tpunb.rundir import LineTail, RunDir


def log(run: RunDir, rank: int | None = None, tail: int | None = None) -> str:
    """The log of a run, or of one rank of it, or the last lines of either.

    Raises TpunbError for a rank that the run has not.
    """
    text = run.log.read_text(encoding="utf-8", errors="replace") if run.log.exists() else ""
    lines = text.removesuffix("\n").split("\n") if text else []
    if (mine := _lines_of(run, rank)) is not None:
        lines = [line for line in lines if mine.match(line)]
    if tail is not None:
        lines = lines[-tail:] if tail else []
    return "".join(f"{line}\n" for line in lines)


def _lines_of(run: RunDir, rank: int | None) -> re.Pattern[str] | None:
    """What a rank's lines begin with; None for all ranks."""
    if rank is None:
        return None
    if rank >= (count := control.read_spec(run).world_size):
        raise TpunbError(f"run {run.id} has no rank {rank}: its ranks are 0 to {count - 1}")
    return re.compile(rf"\[{rank}( err| prelude)?\] ")


def follow(run: RunDir, rank: int | None = None, tail: int | None = None) -> Iterator[str]:
    """The log from its start, or its last `tail` lines, and then as it grows until the run ends."""
    mine = _lines_of(run, rank)
    lines = LineTail(run.log)
    first = True
    try:
        while True:
            over = control.state(run) not in control.ALIVE  # asked before the last look
            text = []
            while new := lines.read():
                text += [line for line in new if mine is None or mine.match(line)]
            if first and tail is not None:
                text = text[-tail:] if tail else []
            first = False
            if text:
                yield "".join(f"{line}\n" for line in text)
            if over:
                return
            time.sleep(control.LOOK)
    finally:
        lines.close()
