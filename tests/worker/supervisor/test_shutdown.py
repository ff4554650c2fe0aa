"""The shutdown sequence, with a simulated clock and simulated processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest

from tests.worker.supervisor.conftest import World
from tpunb.utils.processes import Process
from tpunb.worker.supervisor.shutdown import PARENT_WAIT, ShutdownSequence

RUNNER, RANK, OTHER, CHILD = (Process(pid, 0) for pid in range(1, 5))


@dataclass
class Shutdown:
    """A shutdown sequence, its steps so far, and a simulated clock."""

    world: World
    steps: list[str] = field(default_factory=list)

    def begin(self, *first: Process, grace: float = 15.0, parent: Process | None = None) -> None:
        self.sequence = ShutdownSequence(
            first,
            self.world.living,
            grace=grace,
            parent=parent,
            on_step=self.steps.append,
            clock=lambda: self.world.time,
        )

    def advance(self, to: float) -> bool:
        """Advance the sequence every 0.1 s until then."""
        while self.world.time < to:
            self.world.time = min(self.world.time + 0.1, to)
            if self.sequence.advance():
                return True
        return False


@pytest.fixture
def shutdown(world: World) -> Shutdown:
    return Shutdown(world)


KILL, TERM, INT = int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGINT)


@pytest.mark.parametrize(
    ("deadly", "steps", "seconds"),
    [
        ({INT, TERM, KILL}, ["SIGINT"], 0.3),
        ({TERM, KILL}, ["SIGINT", "SIGTERM"], 15.3),
        ({KILL}, ["SIGINT", "SIGTERM", "SIGKILL"], 15.8),
    ],
)
def test_shutdown_escalates_signals_as_needed(
    shutdown: Shutdown, deadly: set[int], steps: list[str], seconds: float
) -> None:
    shutdown.world.deadly = {RANK: deadly}
    shutdown.begin(RANK)
    assert shutdown.advance(60.0)
    assert shutdown.steps == steps
    assert shutdown.world.time <= seconds + 1e-6
    assert [number for _, number in shutdown.world.sent].count(INT) == 1


def test_shutdown_grace_period_can_be_skipped(shutdown: Shutdown) -> None:
    for moment in (0.0, 5.0):
        shutdown.world.deadly, shutdown.steps, shutdown.world.time = {RANK: {TERM}}, [], 0.0
        shutdown.begin(RANK)
        shutdown.advance(moment)
        shutdown.sequence.skip_grace_period()
        assert shutdown.advance(moment + 0.5)
        assert shutdown.steps == ["SIGINT", "SIGTERM"]


def test_shutdown_kills_until_no_process_is_left(shutdown: Shutdown) -> None:
    """A process that is forked between listing and killing."""
    shutdown.world.deadly = {RANK: {KILL}}
    shutdown.begin(RANK, grace=0.0)
    shutdown.advance(0.3)
    shutdown.world.deadly[OTHER] = {KILL}
    assert shutdown.advance(2.0)
    assert shutdown.steps == ["SIGINT", "SIGTERM", "SIGKILL"]


def test_shutdown_kills_the_parent_long_after_its_children(shutdown: Shutdown) -> None:
    """It may begin another attempt once the ranks of all hosts have ended."""
    shutdown.world.deadly = {RUNNER: {KILL}, RANK: {KILL}}
    shutdown.begin(RANK, grace=1.0, parent=RUNNER)
    assert not shutdown.advance(3.0)
    assert shutdown.world.sent == [(RANK.pid, INT), (RANK.pid, TERM), (RANK.pid, KILL)]
    assert shutdown.advance(PARENT_WAIT + 3.0)
    assert shutdown.world.sent[-1] == (RUNNER.pid, KILL)


def test_shutdown_kills_leftover_children_without_grace(shutdown: Shutdown) -> None:
    shutdown.world.deadly = {CHILD: {KILL}}
    shutdown.begin(grace=15.0)
    assert shutdown.advance(1.0)
    assert shutdown.steps == ["SIGKILL"]
