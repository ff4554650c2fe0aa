"""How far the loops of a rank have come: a small file, which whoever shows the run reads."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from tpunb.events import Bar
from tpunb.rundir import RunDir

EVERY = 0.25
"""Seconds between two writes."""


def file_of_this_rank() -> Path | None:
    """Where this process says it; None if it is no rank of a run."""
    rank, run = os.environ.get("RANK"), os.environ.get("TPUNB_RUN")
    if not run or rank is None:
        return None
    return RunDir(run).progress(int(os.environ.get("TPUNB_ATTEMPT", "0")), int(rank))


class Advance:
    """The file, written a few times a second at most."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._next = 0.0

    def tell(
        self, bars: Callable[[], Sequence[Bar]], samples: int = 0, *, now: bool = False
    ) -> None:
        """Write the bars, outermost first, if it is time to, or `now`."""
        time_is = time.monotonic()
        if time_is < self._next and not now:
            return
        self._next = time_is + EVERY
        text = json.dumps({"bars": [asdict(bar) for bar in bars()], "samples": samples})
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)
