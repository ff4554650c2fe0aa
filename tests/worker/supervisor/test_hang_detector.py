"""The hang detector, with a simulated clock and heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.runs import heartbeat
from tpunb.runs.directory import RunDir
from tpunb.runs.heartbeat import Heartbeat
from tpunb.utils.processes import Work
from tpunb.worker.supervisor.hang_detector import BUSY, MOST_WORK, MOVED, HangDetector

TIMEOUT = 6.0


class Ranks:
    """Two ranks, and a clock that advances in steps of half a second."""

    def __init__(self, folder: Path, *, prelude: bool = False) -> None:
        self.run = RunDir(folder)
        self.time = 100.0
        self.work = {0: Work(50.0, 10**9), 1: Work(50.0, 10**9)}
        self.working = Work(0.0, 0)
        """The work of rank 1 in one second."""
        self.detector = HangDetector(
            self.run,
            0,
            range(2),
            TIMEOUT,
            lambda: self.work,
            prelude=prelude,
            clock=lambda: self.time,
        )

    def beat(self, rank: int, beat: Heartbeat) -> None:
        path = self.run.heartbeat(0, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = bytearray(heartbeat.SIZE)
        beat.pack_into(data)
        path.write_bytes(data)

    def hung_after(self, seconds: float) -> bool:
        end = self.time + seconds
        while self.time < end:
            self.time += 0.5
            done, each = self.work[1], self.working
            self.work = self.work | {
                1: Work(done.seconds + each.seconds / 2, done.bytes + each.bytes // 2)
            }
            if self.detector.is_hung():
                return True
        return False


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_hang_after_silence_longer_than_the_timeout(ranks: Ranks) -> None:
    assert not ranks.hung_after(TIMEOUT)
    assert ranks.hung_after(1.0)


@pytest.mark.parametrize("kind", ["line", "step", "collective", "write", "metric or batch"])
def test_any_activity_of_any_rank_counts(ranks: Ranks, kind: str) -> None:
    for number in range(1, 10):
        if kind == "line":
            ranks.detector.note_activity()
        elif kind == "step":
            ranks.beat(1, Heartbeat(train=1, steps=number))
        elif kind == "collective":
            ranks.beat(1, Heartbeat(train=1, collectives_begun=number, collectives_ended=number))
        elif kind == "write":
            ranks.beat(1, Heartbeat(train=1, writes_begun=number, writes_ended=number))
        else:
            ranks.beat(1, Heartbeat(train=1, activity=number))
        assert not ranks.hung_after(TIMEOUT - 1)
    assert ranks.hung_after(TIMEOUT + 1)


def test_no_hang_during_a_long_compilation(ranks: Ranks) -> None:
    ranks.beat(0, Heartbeat(train=1, compilations_begun=3, compilations_ended=2))
    assert not ranks.hung_after(600.0)
    ranks.beat(0, Heartbeat(train=1, compilations_begun=3, compilations_ended=3))
    assert not ranks.hung_after(TIMEOUT)
    assert ranks.hung_after(1.0)


@pytest.mark.parametrize(
    "working",
    [
        Work(1.5 * BUSY, 0),
        Work(2.0, 0),
        Work(0.0, MOVED),
    ],
    ids=["some work", "much work", "copying"],
)
def test_a_rank_that_works_is_taken_to_be_active(ranks: Ranks, working: Work) -> None:
    ranks.beat(1, Heartbeat(train=1))
    ranks.working = working
    assert not ranks.hung_after((MOST_WORK - 1) * TIMEOUT)
    ranks.working = Work(0.0, 0)
    assert ranks.hung_after(2 * TIMEOUT + 2)


def test_an_endless_loop_and_a_loop_that_polls_are_hangs(ranks: Ranks) -> None:
    ranks.working = Work(BUSY / 2, MOVED // 100)
    assert ranks.hung_after(TIMEOUT + 1)
    ranks.working = Work(1.0, 0)
    assert ranks.hung_after((MOST_WORK + 2) * TIMEOUT)
    assert ranks.detector.silence > MOST_WORK * TIMEOUT


def test_work_before_an_output_line_does_not_accumulate(ranks: Ranks) -> None:
    ranks.working = Work(1.0, 0)
    for _ in range(3):
        assert not ranks.hung_after((MOST_WORK - 1) * TIMEOUT)
        ranks.detector.note_activity()
    assert not ranks.hung_after((MOST_WORK - 1) * TIMEOUT)


def test_no_hang_for_time_the_supervisor_was_suspended(ranks: Ranks) -> None:
    """The supervisor was stopped, and with it perhaps the whole machine."""
    ranks.beat(0, Heartbeat(train=1, steps=1))
    assert not ranks.hung_after(TIMEOUT - 1)
    ranks.time += 1000.0
    ranks.working = Work(1.0, 0)
    assert not ranks.hung_after((MOST_WORK - 2) * TIMEOUT)
    ranks.working = Work(0.0, 0)
    assert ranks.hung_after(2 * TIMEOUT + 2)


def test_no_hang_in_a_prelude_run_by_the_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, prelude=True)
    assert not ranks.hung_after(600.0)
    ranks.beat(0, Heartbeat(train=1))
    assert ranks.hung_after(TIMEOUT + 1)
