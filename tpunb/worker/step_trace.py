"""`--profile`: the trace of some steps of a rank, and its waiting times in each of them."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tpunb.backends import current
from tpunb.backends.rehearsal.stats import collective_stats
from tpunb.runs import heartbeat, trace
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.spec import Profile
from tpunb.runs.trace import Marks

_Counts = tuple[float, float, float, float]
"""Seconds: the time, and the totals so far of waiting for input, compiling, and collectives."""


class StepTrace:
    """Begins and ends the trace of one rank, and notes the times of its steps.

    All ranks' traces of a run are one session of xprof: torch_xla names a trace by second and
    host, so each rank writes its own elsewhere and moves it there.
    """

    def __init__(self, profile: Profile, run: RunDir, attempt: int, rank: int) -> None:
        self._profile = profile
        self._run = run
        self._marks = run.step_times(attempt, rank)
        self._rank = rank
        self._running = self._failed = False
        self._last: _Counts = (0.0, 0.0, 0.0, 0.0)
        self._steps: list[tuple[float, float, float, float]] = []
        self._profiler = _make_profiler()
        if profile.first == 1:
            self._begin()

    def after(self, step: int) -> None:
        """Handle the end of a step; the first one of this process has the number 1."""
        if self._running:
            now = _counts()
            seconds, waited, compiled, exchanged = (
                b - a for a, b in zip(self._last, now, strict=True)
            )
            self._steps.append((seconds, waited, compiled, exchanged))
            self._last = now
        if step == self._profile.last:
            self._end()
        elif step == self._profile.first - 1:
            self._begin()

    @property
    def _own(self) -> Path:
        """The folder in which torch_xla writes this rank's trace."""
        return self._run.profile / f".rank-{self._rank}"

    def _begin(self) -> None:
        self._running = True
        self._last = _counts()
        atexit.register(self._end)  # the loop may have fewer steps
        with self._explained():
            self._own.mkdir(parents=True, exist_ok=True)
            self._profiler.start_trace(str(self._own))

    def _end(self) -> None:
        if not self._running:
            return
        self._running = False
        with self._explained():
            self._profiler.stop_trace()
            session = trace.session_of(self._run, self._profile)
            session.mkdir(parents=True, exist_ok=True)
            for suffix in (trace.SUFFIX, trace.TORCH_SUFFIX):
                for written in sorted(self._own.rglob(f"*{suffix}")):
                    os.replace(written, session / f"rank-{self._rank}{suffix}")
        shutil.rmtree(self._own, ignore_errors=True)
        first = self._profile.first
        marks = Marks(first, first + len(self._steps) - 1, *_columns(self._steps))
        with contextlib.suppress(OSError):  # a full disk: `_explained` has reported it
            trace.write_marks(self._marks, marks)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Report, once, why there is no trace: a full disk, or a running trace of the user's own.

        torch_xla raises RuntimeError for both. The run continues.
        """
        try:
            yield
        except (OSError, RuntimeError) as error:
            if not self._failed:
                self._failed = True
                with contextlib.suppress(OSError):  # if the disk is full, the result reports it
                    self._run.emit(Note(f"rank {self._rank}: --profile has no trace: {error}"))


def _columns(steps: list[tuple[float, float, float, float]]) -> list[tuple[float, ...]]:
    return [tuple(step[column] for step in steps) for column in range(4)]


def _counts() -> _Counts:
    return (
        time.perf_counter(),
        heartbeat.input_seconds(),
        current.backend().counts()[3] / 1e9,
        collective_stats.seconds(),
    )


class _TorchProfiler:
    """torch's own profiler, with the functions of torch_xla's."""

    def start_trace(self, folder: str) -> None:
        self._path = Path(folder, f"trace{trace.TORCH_SUFFIX}")
        # It changes nothing for one cycle; without it, torch warns on a GPU (2.11).
        self._profile = torch.profiler.profile(acc_events=True)
        self._profile.start()

    def stop_trace(self) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))


def _make_profiler() -> Any:
    if current.backend().has_programs:
        return importlib.import_module("torch_xla.debug.profiler")
    return _TorchProfiler()
