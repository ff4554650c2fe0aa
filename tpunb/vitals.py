"""How the ranks of a run stand now: their pulses, their progress, and the memory they take."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpunb import beat
from tpunb.events import Bar, Life, RankLife
from tpunb.rundir import RunDir

_PAGE = os.sysconf("SC_PAGE_SIZE")


def look(run: RunDir, attempt: int, pids: Sequence[int]) -> Life:
    """Read what the ranks of an attempt leave in their folders, and what the system says."""
    return Life(tuple(_rank(run, attempt, rank, pid) for rank, pid in enumerate(pids)))


def _rank(run: RunDir, attempt: int, rank: int, pid: int) -> RankLife | None:
    pulse, progress = _paths(run.path, attempt, rank)
    last = beat.read(pulse)
    if last is None:
        return None
    told = _progress(progress)
    return RankLife(
        begun=bool(last.train),
        steps=last.steps,
        collectives=last.collectives_ended,
        waiting=last.waiting,
        compiling=last.compiling,
        compilations=last.compilations_ended,
        compile_seconds=last.compile_nanoseconds / 1e9,
        memory=resident(pid),
        bars=tuple(Bar(**bar) for bar in told.get("bars", ())),
        samples=told.get("samples", 0),
    )


@lru_cache(maxsize=1024)
def _paths(folder: Path, attempt: int, rank: int) -> tuple[str, str]:
    """Made once: for many ranks it would take longer than to read the files."""
    run = RunDir(folder)
    return str(run.pulse(attempt, rank)), str(run.progress(attempt, rank))


def _progress(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            found: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        return {}
    return found


def resident(pid: int) -> int:
    """Bytes of a process that are in RAM, those shared with others too; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0
