"""The progress of a rank's loops: a small file that followers of the run read."""

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
    """The content of the file."""

    bars: tuple[Bar, ...] = ()
    """The loops, outermost first."""
    samples: int = 0


class ProgressFile:
    """The progress file of one rank, written a few times a second at most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = 0.0

    def write(
        self, bars: Callable[[], Sequence[Bar]], samples: int = 0, *, now: bool = False
    ) -> None:
        """Write the bars, outermost first, if the last write is long enough ago or with `now`."""
        time_is = time.monotonic()
        if time_is < self._next and not now:
            return
        self._next = time_is + EVERY
        text = json.dumps(asdict(Progress(tuple(bars()), samples)))
        # A full disk or a missing folder must not end a training.
        with contextlib.suppress(OSError):
            atomic_write(self.path, text.encode())


def progress_path() -> Path | None:
    """Return the progress file of this process; None if it is not a rank of a run."""
    this = rank_of_run()
    return None if this is None else this.run.progress(this.attempt, this.rank)
