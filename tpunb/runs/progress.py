"""Progress of the loops of a rank: a small file that followers of the run read."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tpunb.runs.directory import rank_of_run
from tpunb.runs.events import Bar
from tpunb.utils.files import atomic_write

EVERY = 0.25
"""Seconds between two writes."""


@dataclass(frozen=True)
class Progress:
    """What the file says."""

    bars: tuple[Bar, ...] = ()
    """The outermost first."""
    samples: int = 0


class ProgressFile:
    """The file of one rank, written a few times a second at most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = 0.0

    def write(
        self, bars: Callable[[], Sequence[Bar]], samples: int = 0, *, now: bool = False
    ) -> None:
        """Write the bars, outermost first, if it is time to, or `now`."""
        time_is = time.monotonic()
        if time_is < self._next and not now:
            return
        self._next = time_is + EVERY
        text = json.dumps(asdict(Progress(tuple(bars()), samples)))
        # A full disk, a folder that is gone: not worth ending a training for.
        with contextlib.suppress(OSError):
            atomic_write(self.path, text.encode())


def progress_path() -> Path | None:
    """The progress file of this process; None if it is no rank of a run."""
    this = rank_of_run()
    return None if this is None else this.run.progress(this.attempt, this.rank)
