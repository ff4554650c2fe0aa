"""`tpunb top`: all active runs, their ranks, steps and chips, in a terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpunb.display.html import describe_some_chips
from tpunb.runs import directory, follow, state
from tpunb.runs.chips import Chip, read_chips
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Phase, RankSnapshot, RanksStarted
from tpunb.runs.spec import Device, RunSpec, RunState, name_device
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

EVERY = 1.0
"""Seconds between polls; rates are measured between two polls."""


@dataclass(frozen=True)
class ActiveRun:
    run: str
    state: RunState
    phase: str
    """A description of what the run is doing."""
    world_size: int
    device: Device
    place: str | None
    seconds: float
    """Time since the run was ordered."""
    ranks: tuple[RankSnapshot | None, ...] = ()
    steps_per_second: float | None = None
    """None after the first poll."""
    waiting_for_data: float | None = None
    """Share of the time, for the rank that waited longest."""
    chips: tuple[Chip, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the values for `--json`: bytes, seconds, and duty cycles in percent."""
        shown = "steps memory compiling waiting compile_seconds input_seconds".split()
        ranks = [
            None if rank is None else {name: getattr(rank, name) for name in shown}
            for rank in self.ranks
        ]
        return {**asdict(self), "ranks": ranks}


@dataclass
class Top:
    """Polls the active runs of a folder and measures their rates."""

    runs: Path
    clock: Callable[[], float] = time.monotonic
    _before: dict[str, tuple[float, int, tuple[RankSnapshot | None, ...]]] = field(
        default_factory=dict
    )
    """Time of the last poll, attempt and ranks, by run."""

    _over: set[str] = field(default_factory=set)
    """Ended runs, which need not be read again: a sweep has thousands of them."""

    def poll(self) -> list[ActiveRun]:
        """Return the active runs, oldest first. Raises TpunbError for an unreadable folder."""
        found = []
        for run in directory.list_runs(self.runs):
            if run.id in self._over:
                continue
            standing = state.run_state(run)
            if not standing.active:
                if standing is not RunState.LOST:  # a run that is starting looks lost
                    self._over.add(run.id)
                self._before.pop(run.id, None)
                continue
            with contextlib.suppress(TpunbError, OSError):  # the folder was just removed
                found.append(self._read(run, standing, state.read_spec(run)))
        return found

    def _read(self, run: RunDir, standing: RunState, spec: RunSpec) -> ActiveRun:
        events = run.read_events()
        phase = next((event.text for event in reversed(events) if isinstance(event, Phase)), "")
        started = next((e for e in reversed(events) if isinstance(e, RanksStarted)), None)
        seen: tuple[RankSnapshot | None, ...] = ()
        speed = waits = None
        if started is not None:
            seen = follow.sample_ranks(run, started.attempt, started.pids).ranks
            now = self.clock()
            at, attempt, before = self._before.get(run.id, (now, -1, ()))
            if attempt == started.attempt and now > at:
                speed = _most(before, seen, lambda rank: rank.steps) / (now - at)
                waited = _most(before, seen, lambda rank: rank.input_seconds)
                waits = min(waited / (now - at), 1.0)
            self._before[run.id] = now, started.attempt, seen
        return ActiveRun(
            run.id,
            standing,
            phase,
            spec.world_size,
            spec.device,
            spec.place,
            max(0.0, time.time() - run.spec.lstat().st_mtime),
            seen,
            speed,
            waits,
            read_chips(run.path, spec.hosts),
        )


def _most(
    before: Sequence[RankSnapshot | None],
    now: Sequence[RankSnapshot | None],
    count: Callable[[RankSnapshot], float],
) -> float:
    """Return the growth of a count in the rank in which it grew most."""
    pairs = zip(before, now, strict=False)
    return max(
        (count(b) - count(a) for a, b in pairs if a is not None and b is not None), default=0
    )


def describe_runs(active: Sequence[ActiveRun], runs: Path) -> str:
    """Return a block of text for each run."""
    if not active:
        return f"No active runs in {runs}."
    return "\n\n".join("\n  ".join(_lines(each)) for each in active)


def _lines(run: ActiveRun) -> list[str]:
    where = f" on {run.place}" if run.place else ""
    doing = run.phase if run.state is RunState.RUNNING and run.phase else str(run.state)
    living = [rank for rank in run.ranks if rank is not None]
    ranks = f"{run.world_size} rank{'s' if run.world_size != 1 else ''}"
    head = f"{run.run} · {doing} · {ranks}{where} · {name_device(run.device)}"
    parts = []
    if living:
        parts.append(f"step {max(rank.steps for rank in living):,}")
    if run.steps_per_second:
        parts.append(f"{run.steps_per_second:,.3g} steps/s")
    if run.waiting_for_data:
        parts.append(f"waiting for data {100 * run.waiting_for_data:.0f} %")
    if memory := max((rank.memory for rank in living), default=0):
        parts.append(
            f"memory {size(memory)} a rank" if len(living) > 1 else f"memory {size(memory)}"
        )
    for count, what in (
        (sum(rank.compiling for rank in living), "compiling"),
        (sum(rank.waiting for rank in living), "in a collective"),
    ):
        parts += [f"{count} {what}"] if count else []
    lines = [f"{head} · {duration(run.seconds)}", " · ".join(parts)]
    return [*filter(None, lines), *describe_some_chips(run.chips)]


def show_once(runs: Path, *, as_json: bool, pause: Callable[[float], None] = time.sleep) -> None:
    """Print the active runs; if there are ranks, after two polls, to measure their rates."""
    top = Top(runs)
    active = top.poll()
    if any(each.ranks for each in active):
        pause(EVERY)
        active = top.poll()
    if as_json:
        print(json.dumps([each.to_json() for each in active], indent=1))
    else:
        print(describe_runs(active, runs))


def show_live(runs: Path) -> None:
    """Show the active runs and update them once a second, until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    top = Top(runs)

    def render() -> RenderableType:
        return Text(describe_runs(top.poll(), runs))

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(render(), auto_refresh=False, screen=sys.stdout.isatty()) as live,
    ):
        while True:
            time.sleep(EVERY)
            live.update(render(), refresh=True)
