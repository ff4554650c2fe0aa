"""How long something takes in a rank, for the end of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tpunb.rundir import RunDir, append


@contextmanager
def counted_as_saving() -> Iterator[None]:
    """A block, or a function, whose time is that of checkpoints; counts only in a run."""
    began = time.perf_counter()
    try:
        yield
    finally:
        rank, run = os.environ.get("RANK"), os.environ.get("TPUNB_RUN")
        if run and rank is not None:
            path = RunDir(run).saving(int(os.environ.get("TPUNB_ATTEMPT", "0")), int(rank))
            # On a full disk what save says counts, and not how long it took.
            with suppress(OSError):
                append(path, f"{time.perf_counter() - began:.3f}\n")
