"""Supervision of one run with simulated messages, exits and time: nothing is started, or sleeps."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.worker.supervisor.conftest import World
from tpunb.runs import directory
from tpunb.runs.events import Ended, Note, Phase, RanksStarted, Stopping
from tpunb.runs.protocol import (
    CellStarted,
    PreludeNotForkable,
    RankExited,
    RanksForked,
    RunnerExits,
    RunnerForked,
    StopRanks,
)
from tpunb.runs.result import RunResult
from tpunb.runs.spec import FailureKind, PhaseKind, RunSpec, Stop, StopCause, StopOrigin
from tpunb.utils import files, processes
from tpunb.utils.processes import Process
from tpunb.worker.supervisor import stacks
from tpunb.worker.supervisor.nodes import LocalNode
from tpunb.worker.supervisor.supervision import Supervision

FORK_SERVER, RUNNER, RANK_0, RANK_1, LATE_0, LATE_1 = (Process(pid, 0) for pid in range(10, 16))
INT, TERM, KILL = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGKILL)


class OneRun:
    """A Supervision of simulated processes."""

    def __init__(self, folder: Path, world: World, **spec: object) -> None:
        self.world = world
        world.deadly = {FORK_SERVER: set()}
        self.dir = directory.create_run(folder, "n")
        values = RunSpec(self.dir.id, "n", 2, "CPU", "/", (), (), **spec)  # type: ignore[arg-type]
        self.dir.write_spec(values)
        self.finished = False
        self.forks: list[str | None] = []
        self.spared, self.copying = [FORK_SERVER], False
        self.node = LocalNode(
            0,
            range(2),
            self.dir,
            self.forks.append,
            lambda: self.spared,
            lambda: self.copying,
            env={},
            clock=lambda: world.time,
        )
        self.supervision = Supervision(self.dir, values, [self.node], clock=lambda: world.time)

    def send(self, *messages: object) -> None:
        for message in messages:
            self.node.on_message(message)  # type: ignore[arg-type]

    def fork_runner(self) -> None:
        self.world.deadly[RUNNER] = {INT, TERM, KILL}
        self.send(RunnerForked(RUNNER.pid))

    def fork_ranks(self, attempt: int = 0, *ranks: Process, dies_of: int = INT) -> None:
        for rank in ranks or (RANK_0, RANK_1):
            self.world.deadly[rank] = {dies_of, KILL}
        self.send(RanksForked(attempt, [rank.pid for rank in ranks or (RANK_0, RANK_1)]))

    def start(self, **options: int) -> None:
        self.supervision.begin()
        self.fork_runner()
        self.fork_ranks(**options)

    def exit_rank(
        self, rank: int, code: int, process: Process | None = None, *, finished: bool = True
    ) -> None:
        self.world.deadly.pop(process or (RANK_0, RANK_1)[rank], None)
        self.send(RankExited(rank, code, time.time(), 1000, finished and code == 0))

    def exit_runner(self, code: int, *, by_itself: bool = True) -> None:
        self.world.deadly.pop(RUNNER, None)
        if code < 0 or not by_itself:
            self.world.exit_codes[RUNNER.pid] = code
        else:
            self.send(RunnerExits(code))

    def end(self, code: int) -> None:
        """Let both ranks end, and then the runner."""
        self.exit_rank(0, code)
        self.exit_rank(1, code)
        self.exit_runner(int(code != 0))

    def pass_time(self, seconds: float) -> bool:
        """Let time pass; True if the run has ended by then."""
        end = self.world.time + seconds
        while self.world.time < end:
            self.world.time += 0.25
            if self.supervision.step():
                self.finished = True
                return True
        return False

    def finish(self) -> RunResult:
        assert self.pass_time(60.0)
        result = self.dir.read_result()
        assert result is not None
        return result

    def events(self, kind: type) -> list:
        return [event for event in self.dir.read_events() if isinstance(event, kind)]

    def close(self) -> None:
        """End a run that a test has not finished."""
        self.world.deadly.clear()
        if not self.finished:
            self.exit_runner(0)
            assert self.pass_time(60.0)


Make = Callable[..., OneRun]


@pytest.fixture
def one_run(tmp_path: Path, world: World) -> Iterator[Make]:
    made: list[OneRun] = []

    def make(**spec: object) -> OneRun:
        made.append(OneRun(tmp_path, world, **spec))
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_a_run_that_succeeds(one_run: Make) -> None:
    run = one_run()
    assert not run.supervision.step()
    assert run.forks == []
    run.start()
    assert run.forks == [None]
    assert run.dir.is_running()
    run.exit_rank(0, 0)
    run.exit_rank(1, 0)
    assert not run.pass_time(1.0)
    run.exit_runner(0)
    result = run.finish()
    assert (result.state, result.stop, result.failures) == ("succeeded", None, ())
    assert result.peak_memory == (1000, 1000)
    assert run.events(Stopping) == []
    assert run.events(Ended)[-1].state == "succeeded"
    assert run.events(Phase)[-1].kind is PhaseKind.ENDED
    assert not run.dir.is_running()
    assert run.world.sent == []


def test_failure_of_a_rank_is_named_before_it_has_ended(one_run: Make) -> None:
    """A failed rank's exit handlers may take long. The rank waiting for it has failed as well."""
    run = one_run()
    run.start()
    error = {"message": "", "cell": None, "line": None, "traceback": "", "type": "ValueError"}
    for rank, kind in enumerate(("peer_lost", "exception")):
        run.dir.attempt(0, rank).mkdir(parents=True, exist_ok=True)
        files.write_json(run.dir.error(0, rank), {**error, "kind": kind, "time": 1.0 + rank})
    run.send(StopRanks())
    run.pass_time(1.0)
    run.exit_rank(1, 1, finished=False)
    run.exit_rank(0, 1, finished=False)
    run.exit_runner(1)
    assert run.finish().reason == "rank 1 has failed"


@pytest.mark.parametrize("training", [False, True])
def test_failure_if_the_runner_exits_unannounced(one_run: Make, training: bool) -> None:
    """os._exit(0) in a cell of the prelude."""
    run = one_run()
    run.supervision.begin()
    run.fork_runner()
    run.send(CellStarted(3))
    if training:
        run.fork_ranks()
        run.world.deadly.pop(RANK_0)
        run.world.deadly.pop(RANK_1)
    run.exit_runner(0, by_itself=False)
    result = run.finish()
    assert result.state == "failed"
    assert result.failure is not None
    who = "the process that watches the ranks" if training else "the prelude"
    assert result.failure.headline().startswith(f"{who} ended before the ")
    assert result.failure.cell == (None if training else 3)


def test_failure_of_a_rank_stops_the_others(one_run: Make) -> None:
    run = one_run()
    run.start()
    run.exit_rank(1, 3)
    run.send(StopRanks())
    run.pass_time(1.0)
    assert run.world.sent == [(RANK_0.pid, INT)]
    run.exit_rank(0, -INT)
    run.exit_runner(1)
    result = run.finish()
    assert (result.state, result.stop) == ("failed", Stop(StopCause.PEER_FAILED))
    assert [(failure.rank, failure.kind) for failure in result.failures] == [(1, FailureKind.EXIT)]


def test_stop_after_a_failure_does_not_blame_the_stopped_ranks(one_run: Make) -> None:
    run = one_run()
    run.start()
    run.exit_rank(1, 3)
    run.send(StopRanks())
    run.pass_time(1.0)
    error = {"type": "KeyboardInterrupt", "message": "", "cell": 7, "line": 1, "traceback": ""}
    run.dir.attempt(0, 0).mkdir(parents=True, exist_ok=True)
    files.write_json(run.dir.error(0, 0), {**error, "time": time.time(), "kind": "exception"})
    run.supervision.stop(Stop(reason="enough"))
    run.exit_rank(0, 130)
    run.exit_runner(1)
    result = run.finish()
    assert (result.state, [failure.rank for failure in result.failures]) == ("failed", [1])


def test_stop_records_its_cause_and_origin(one_run: Make) -> None:
    run = one_run()
    run.start()
    run.supervision.stop(Stop(StopCause.USER, "enough", origin=StopOrigin.HANDLE))
    run.supervision.stop(Stop(StopCause.KERNEL_GONE, "too late to be the cause"))
    run.pass_time(1.0)
    run.end(-INT)
    result = run.finish()
    stop = Stop(StopCause.USER, origin=StopOrigin.HANDLE)
    assert (result.state, result.reason, result.stop) == ("interrupted", "enough", stop)
    assert [(event.step, event.stop) for event in run.events(Stopping)] == [("SIGINT", stop)]
    assert json.loads(run.dir.result.read_text())["stop"] == {
        "cause": "interrupt",
        "origin": "handle",
    }


def test_stop_waits_the_grace_period_unless_hurried(one_run: Make) -> None:
    run = one_run(grace=20.0)
    run.start(dies_of=TERM)
    run.supervision.stop(Stop(StopCause.USER, "enough"))
    run.pass_time(19.0)
    assert [event.step for event in run.events(Stopping)] == ["SIGINT"]
    run.supervision.stop(Stop(StopCause.USER, "now", now=True))
    run.pass_time(0.5)
    assert [event.step for event in run.events(Stopping)] == ["SIGINT", "SIGTERM"]
    assert RANK_0 not in run.world.deadly


def test_stop_of_a_runner_that_ends_before_the_supervisor_adopts_it(one_run: Make) -> None:
    """Its exit code is unknown until then, and must not be taken for a kill by somebody else."""
    run = one_run()
    run.supervision.begin()
    run.fork_runner()
    run.supervision.stop(Stop(reason="enough", now=True))
    run.world.zombies.add(RUNNER.pid)
    assert not run.pass_time(2.0)
    run.world.zombies.clear()
    run.world.exit_codes[RUNNER.pid] = -INT
    result = run.finish()
    assert (result.state, result.failures) == ("interrupted", ())


def test_stop_before_the_run_begins(one_run: Make) -> None:
    run = one_run()
    run.supervision.stop(Stop(reason="enough"))
    run.supervision.begin()
    assert run.forks == []
    assert run.finish().state == "interrupted"


@pytest.mark.parametrize("forked", ["runner", "ranks"])
def test_stop_reaches_processes_forked_meanwhile(one_run: Make, forked: str) -> None:
    run = one_run()
    run.supervision.begin()
    if forked == "ranks":
        run.fork_runner()
        run.world.deadly[RUNNER] = {KILL}  # it forks ranks, and does not answer meanwhile
    run.supervision.stop(Stop(StopCause.USER, "enough"))
    if forked == "runner":
        run.fork_runner()
    else:
        run.pass_time(0.5)
        run.fork_ranks()
    run.pass_time(1.0)
    assert RANK_0 not in run.world.deadly
    assert (forked == "runner") == (RUNNER not in run.world.deadly)
    assert [event.step for event in run.events(Stopping)] == ["SIGINT"]


def test_timeout_stops_the_run(one_run: Make) -> None:
    run = one_run(timeout=30.0, hang_timeout=0.0)
    run.start()
    run.pass_time(30.0)
    assert run.world.sent == []
    run.pass_time(1.0)
    run.end(-INT)
    result = run.finish()
    assert (result.state, result.returncode) == ("timed_out", 124)
    assert result.stop == Stop(StopCause.TIMEOUT)


def test_hang_after_silence(one_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = one_run(hang_timeout=10.0)
    run.start()
    for rank in (0, 1):
        run.dir.attempt(0, rank).mkdir(parents=True)
    for _ in range(3):
        run.pass_time(9.0)
        with open(run.dir.attempt(0, 1) / "stdout.log", "a") as log:
            log.write("a line\n")
    run.pass_time(11.0)
    run.end(-INT)
    result = run.finish()
    assert (result.state, result.stop) == ("hung", Stop(StopCause.HUNG))
    assert [failure.kind for failure in result.failures] == [FailureKind.HANG]
    assert PhaseKind.COLLECTING_STACKS in [phase.kind for phase in run.events(Phase)]


@pytest.fixture
def slow_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks take a signal for their stacks, and never write them."""
    monkeypatch.setattr(processes, "process_state", lambda process: "S")
    monkeypatch.setattr(processes, "send_signal", lambda process, number: True)


def hang(run: OneRun) -> None:
    """Let a run hang until its ranks' stacks are being collected."""
    run.start()
    for rank in (0, 1):
        run.dir.attempt(0, rank).mkdir(parents=True)
        run.dir.stacks(0, rank).touch()
    while PhaseKind.COLLECTING_STACKS not in [phase.kind for phase in run.events(Phase)]:
        run.pass_time(0.25)


@pytest.mark.usefixtures("slow_stacks")
def test_stop_during_stack_collection_is_carried_out_at_once(one_run: Make) -> None:
    run = one_run(hang_timeout=10.0, grace=30.0)
    hang(run)
    run.pass_time(stacks._WAIT / 2)
    assert run.world.sent == []  # the supervision has not waited for the stacks, nor the ranks yet
    run.supervision.stop(Stop(StopCause.USER, "enough", origin=StopOrigin.COMMAND))
    run.pass_time(0.25)
    assert {(rank.pid, INT) for rank in (RANK_0, RANK_1)} == set(run.world.sent)
    run.end(-INT)
    result = run.finish()
    assert (result.state, result.stop) == ("hung", Stop(StopCause.HUNG))
    assert [failure.kind for failure in result.failures] == [FailureKind.HANG]


@pytest.mark.usefixtures("slow_stacks")
def test_no_hang_if_the_run_ends_during_stack_collection(one_run: Make) -> None:
    run = one_run(hang_timeout=10.0)
    hang(run)
    run.end(0)
    assert run.finish().state == "succeeded"


def test_no_hang_in_a_prelude_that_runs_once(one_run: Make) -> None:
    run = one_run(hang_timeout=10.0)
    run.supervision.begin()
    run.fork_runner()
    assert not run.pass_time(600.0)
    assert run.world.sent == []


def test_preemption_stops_the_run(one_run: Make) -> None:
    run = one_run()
    run.start()
    run.node.preemption.notice = "instance/preempted is TRUE"
    run.pass_time(0.5)
    assert [event.stop for event in run.events(Stopping)] == [Stop(StopCause.PREEMPTED)]


def test_replicate_if_the_prelude_cannot_be_forked(one_run: Make) -> None:
    run = one_run()
    run.supervision.begin()
    run.fork_runner()
    run.send(CellStarted(2), PreludeNotForkable("cell [2] uses an XLA device"))
    run.exit_runner(0)
    assert not run.pass_time(1.0)
    assert run.forks == [None, "cell [2] uses an XLA device"]
    run.fork_runner()
    run.fork_ranks()
    run.end(0)
    result = run.finish()
    assert (result.state, result.replicated) == ("succeeded", True)
    assert result.replicate_reason == "cell [2] uses an XLA device"


def test_a_retry_forgets_the_attempt_before(one_run: Make) -> None:
    run = one_run(retries=1)
    run.start()
    run.exit_rank(1, 3)
    run.send(StopRanks())
    run.pass_time(1.0)
    run.exit_rank(0, -INT)
    left = Process(99, 0)
    run.world.deadly[left] = {KILL}
    (run.dir.attempt(1, 0)).mkdir(parents=True)
    run.world.sent.clear()
    run.fork_ranks(1, LATE_0, LATE_1)
    assert len(run.events(RanksStarted)) == 2
    assert run.events(Note)[0].text.endswith("starting again (retry 1 of 1)")
    run.supervision.stop(Stop(StopCause.USER, "enough"))
    run.pass_time(1.0)
    assert (LATE_0.pid, INT) in run.world.sent
    run.exit_rank(0, -INT, LATE_0)
    run.exit_rank(1, -INT, LATE_1)
    run.exit_runner(1)
    result = run.finish()
    assert (result.state, result.attempts, result.failures) == ("interrupted", 2, ())


def test_crash_of_the_fork_server_before_the_runner_is_a_failure(one_run: Make) -> None:
    run = one_run()
    run.supervision.begin()
    del run.world.deadly[FORK_SERVER]
    run.node.lose_fork_server(-9, "last words")
    result = run.finish()
    assert result.state == "failed"
    assert [failure.kind for failure in result.failures] == [FailureKind.LOST]


def test_crash_of_the_fork_server_later_does_not_end_the_run(one_run: Make) -> None:
    run = one_run()
    run.start()
    del run.world.deadly[FORK_SERVER]
    run.node.lose_fork_server(-9, "last words")
    assert not run.pass_time(1.0)
    run.end(0)
    assert run.finish().state == "succeeded"


@pytest.mark.parametrize("end", ["runner killed", "stopped"])
def test_a_copy_that_is_being_made_does_not_end_with_the_run(one_run: Make, end: str) -> None:
    run = one_run()
    run.copying = True
    run.start()
    copy = LATE_0
    run.world.deadly[copy] = {TERM, KILL}
    if end == "stopped":
        run.supervision.stop(Stop(StopCause.USER, "asked"))
        run.world.deadly[RUNNER] = {KILL}
    else:
        run.exit_runner(-KILL)
    assert not run.pass_time(1.0)
    assert run.world.sent == []
    run.copying = False
    run.spared.append(copy)
    run.finish()
    assert copy in run.world.living()
    assert run.dir.stopping.exists() == (end == "stopped")
