"""`--profile`: a trace of what ran when, written in this process."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator
from pathlib import Path


def new_folder(runs: Path) -> Path:
    """A folder for a trace, beside those of runs: 'runs/profile-20260131-120000'."""
    return runs / time.strftime("profile-%Y%m%d-%H%M%S")


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[None]:
    """A block that is traced into a folder; then says how to open it."""
    profiler = importlib.import_module("torch_xla.debug.profiler")
    folder.mkdir(parents=True, exist_ok=True)
    profiler.start_trace(str(folder))
    try:
        yield
    finally:
        profiler.stop_trace()
        print(f"trace: {folder}; to open it: pip install xprof, then xprof --logdir {folder}")
