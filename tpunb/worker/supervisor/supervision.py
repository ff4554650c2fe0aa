"""Supervises one run, from its turn on the device to the written result."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Event, Note, Phase, RankEnded, RanksStarted, Stopping
from tpunb.runs.follow import Outputs
from tpunb.runs.protocol import (
    CellStarted,
    Message,
    PreludeNotForkable,
    RankExited,
    RanksForked,
    RunnerExits,
    RunnerForked,
    StopRanks,
)
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind, PhaseKind, Stop, StopCause, StopOrigin
from tpunb.utils import files, processes
from tpunb.utils.memory import OomDetector
from tpunb.utils.processes import Process, Work
from tpunb.worker.supervisor import outcome, stacks
from tpunb.worker.supervisor.hang_detector import LONG_WAIT, HangDetector
from tpunb.worker.supervisor.outcome import ProcessExit, RunObservation, StopRecord
from tpunb.worker.supervisor.preemption import PreemptionWatcher
from tpunb.worker.supervisor.recompile_notes import RecompileNotes
from tpunb.worker.supervisor.run_log import RunLog
from tpunb.worker.supervisor.shutdown import ShutdownSequence

log = logging.getLogger(__name__)


class Supervision:
    """Follows the processes of one run, stops them, and writes the result.

        begin ──> runner forked ──> ranks forked ──> each rank exits ──> runner exits ──┐
                       │   ^             │    ^            │                            │
          not forkable ╰───╯ replicate   │    ╰── retry ───┤                            v
                                         │                 │ one failed             ┌─ over ─┐
          stop(): user, time-out, hang,  v                 v                        │        │
          kernel gone, preemption ──> ShutdownSequence <── StopRanks   processes left?  ──> finish
                                                                       kill them

    `fork_runner` has a runner forked (its argument: why every rank runs the prelude itself, or
    None). `spared` are processes below this one that are none of this run's, `kept` says what is
    kept of its prelude. Call `step` every few hundredths of a second, after the messages that have
    come.
    """

    def __init__(
        self,
        run: RunDir,
        fork_runner: Callable[[str | None], None],
        spared: Callable[[], Sequence[Process]],
        kept: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dir = run
        self._lock = run.take_lock()
        self._fork_runner = fork_runner
        self._spared = spared
        self._kept = kept
        self._clock = clock
        self.spec = run.read_spec()
        self._started = time.time()
        self._deadline = None if self.spec.timeout is None else clock() + self.spec.timeout
        files.reserve_blocks(run.result)
        files.reserve_blocks(run.events, appended=True)
        files.reserve_blocks(run.log, appended=True)
        self._outputs = Outputs(run, self.spec.world_size)
        self._log = RunLog(run)
        if self.spec.device == "CPU":
            self._log.say("rehearsal on CPU: no TPU takes part in this run")
        self._oom = OomDetector()
        self._preemption = PreemptionWatcher()
        self._attempt = 0
        self._begun = False
        self._replicate = self.spec.replicate
        self._runner: Process | None = None
        self._runner_code: int | None = None
        """With which it has said that it ends."""
        self._runner_gone = False
        """It has ended; what it said last is still to be read."""
        self._ranks: dict[int, Process | None] = {}
        self._pids: dict[int, int] = {}
        self._exits: list[ProcessExit] = []
        self._cell: int | None = None
        self._over = False
        """True once no process of this run will start or report anything any more."""
        self._stop: StopRecord | None = None
        self._shutdown: ShutdownSequence | None = None
        self._no_grace = False
        """No shutdown sequence gives time any more."""
        self._signals_sent: set[str] = set()
        self._fork_server_output = ""
        self._hang_detector: HangDetector | None = None
        self._recompile_notes: RecompileNotes | None = None
        self._hang: Failure | None = None

    def _emit(self, event: Event) -> None:
        """Tell of an event in the run folder. A full disk or a deleted folder ends nothing here."""
        log.info("%s", event)
        with contextlib.suppress(OSError):
            self.dir.emit(event)

    def begin(self) -> None:
        """Have a runner forked; nothing if the run was stopped before."""
        if self._over:
            return
        self._begun = True
        self._fork_runner(self._replicate)

    def on_message(self, message: Message) -> None:
        """Take in a message of the fork server or the runner."""
        match message:
            case RunnerForked(pid):
                self._on_runner_forked(pid)
            case CellStarted(number):
                self._cell = number
            case RanksForked(attempt, pids):
                self._on_ranks_forked(attempt, pids)
            case RankExited():
                self._on_rank_exit(message)
            case StopRanks():
                self._on_stop_ranks()
            case PreludeNotForkable(reason):
                self._replicate = reason
            case RunnerExits(code):
                self._runner_code = code
            case _:
                log.warning("not for a run: %s", message)

    def _on_runner_forked(self, pid: int) -> None:
        self._runner = processes.find_process(pid) or Process(pid, 0)  # it has ended already
        self._runner_code, self._runner_gone = None, False
        if self._stop is not None and self._shutdown is None and not self._over:
            # Stopped while it was being forked: there was nobody yet to be told.
            self._shut_down([self._runner])

    def _on_ranks_forked(self, attempt: int, pids: list[int]) -> None:
        if attempt > self._attempt:
            self._on_retry(attempt)
        self._attempt = attempt
        self._pids = dict(enumerate(pids))
        self._ranks = {rank: processes.find_process(pid) for rank, pid in enumerate(pids)}
        self._hang_detector = HangDetector(
            self.dir,
            attempt,
            len(pids),
            self.spec.hang_timeout,
            self._work_done,
            prelude=self._replicate is not None,
            clock=self._clock,
        )
        self._note_recompiles(last=True)
        self._recompile_notes = RecompileNotes(self.dir, attempt, len(pids))
        self._emit(RanksStarted(attempt, tuple(pids)))
        if self._stop is not None:
            # Stopped while they were being forked: the sequence that runs does not know them.
            self._shut_down(list(self._ranks.values()))

    def _on_retry(self, attempt: int) -> None:
        """The ranks were started again: say why, and forget the attempt before."""
        failure = self._result().failure
        headline = "a rank failed" if failure is None else failure.headline()
        self._emit(Note(f"{headline}: starting again (retry {attempt} of {self.spec.retries})"))
        self._exits.clear()
        if self._stop is not None and self._stop.for_failed_peer:
            self._stop, self._shutdown = None, None
            self._signals_sent.clear()
        # What the user's code has left behind would take part in the next attempt.
        runner = [] if self._runner is None else processes.descendants(self._runner.pid)
        for process in self._all_processes():
            if process != self._runner and process not in runner:
                processes.signal_and_continue(process, signal.SIGKILL)

    def _on_rank_exit(self, message: RankExited) -> None:
        pid = self._pids.get(message.rank)
        is_killed = message.code == -signal.SIGKILL and pid
        self._exits.append(
            ProcessExit(
                message.rank,
                pid,
                message.code,
                message.time,
                message.peak,
                memory=self._oom.evidence(pid) if is_killed and pid else "",
                signals_sent=frozenset(self._signals_sent),
                finished=message.finished,
            )
        )
        self._emit(RankEnded(self._attempt, message.rank, message.code, message.time, message.peak))

    def _on_stop_ranks(self) -> None:
        first = next((end for end in self._exits if end.failed), None)
        reason = "a rank has failed" if first is None else f"rank {first.rank} has failed"
        if self._stop is None:
            self._stop = StopRecord(Stop(StopCause.PEER_FAILED), reason, time.time())
        if self._shutdown is None:
            self._shut_down(list(self._ranks.values()))

    def _on_runner_exit(self, code: int, *, by_itself: bool) -> None:
        runner, self._runner = self._runner, None
        not_forkable = (
            self._replicate is not None and self.spec.replicate is None and not self._ranks
        )
        if not_forkable and code == 0 and by_itself and self._stop is None:
            self._emit(
                Note(f"{self._replicate}: every rank runs the cells above itself (replicate)")
            )
            self._cell = None
            self.begin()
            return
        # 1 is how it ends when a rank has failed, of which the rank itself has left word.
        follows = code == 1 and by_itself and self._ranks and not self.dir.error(0, None).exists()
        ended_well = code == 0 and by_itself
        if not ended_well and not follows and not any(end.failed for end in self._exits):
            self._add_exit(code, None if runner is None else runner.pid, by_itself=by_itself)
        self._over = True

    def _add_exit(
        self, code: int, pid: int | None, *, by_itself: bool = False, fork_server: bool = False
    ) -> None:
        """That of the runner, or of the fork server."""
        is_killed = code == -signal.SIGKILL and pid
        self._exits.append(
            ProcessExit(
                None,
                pid,
                code,
                time.time(),
                memory=self._oom.evidence(pid) if is_killed and pid else "",
                signals_sent=frozenset(self._signals_sent),
                fork_server=fork_server,
                finished=by_itself,
                ranks_forked=bool(self._ranks),
            )
        )

    def lose_fork_server(self, code: int, output: str) -> None:
        """The fork server has ended: a run that has no runner yet never gets one."""
        if not self._over and self._runner is None:
            self._fork_server_output = output
            self._add_exit(code or 1, None, fork_server=True)
            self._over = True

    def _look_after_runner(self) -> None:
        """Take note of the runner's end, once everything that it said has been read."""
        if self._runner is None or processes.is_alive(self._runner):
            return
        if not self._runner_gone:
            self._runner_gone = True
            return
        status = processes.exit_code(self._runner.pid)
        code = self._runner_code if status is None else status
        by_itself = self._runner_code is not None
        self._on_runner_exit(-signal.SIGKILL if code is None else code, by_itself=by_itself)

    def stop(
        self,
        cause: StopCause,
        reason: str,
        *,
        origin: StopOrigin | None = None,
        now: bool = False,
    ) -> None:
        """End the run, with time to save; at once with `now`, or when asked again with it."""
        if self._stop is None or self._stop.for_failed_peer:
            self._stop = StopRecord(Stop(cause, origin), reason, time.time())
        with contextlib.suppress(OSError):  # then there is one more attempt, which is stopped too
            self.dir.stopping.touch()
        if not self._begun:
            self._over = True
        elif self._shutdown is None and not self._over:
            if self._ranks:
                self._shut_down(list(self._living_ranks().values()))
            elif self._runner is not None:
                self._shut_down([self._runner])
        if now:
            self._no_grace = True
            if self._shutdown is not None:
                self._shutdown.skip_grace_period()

    def _shut_down(self, first: list[Process | None]) -> None:
        assert self._stop is not None
        self._shutdown = ShutdownSequence(
            [process for process in first if process is not None],
            self._all_processes,
            parent=self._runner,
            grace=0.0 if self._no_grace else self.spec.grace,
            on_step=self._on_shutdown_step,
            clock=self._clock,
        )

    def _on_shutdown_step(self, step: str) -> None:
        """Once a run: a sequence that is begun anew for ranks just forked is not news."""
        if step not in self._signals_sent:
            self._signals_sent.add(step)
            stop = self._stop
            self._emit(Stopping(step, stop.reason, stop=stop.stop) if stop else Stopping(step, ""))

    def _all_processes(self) -> list[Process]:
        """Every process of the run: all below the supervisor but those that wait for others."""
        spared = self._spared()
        return [p for p in processes.descendants(os.getpid()) if p not in spared]

    def step(self) -> bool:
        """Merge logs, look at the clock, advance a shutdown. True when all is over."""
        self._look_after_runner()
        outputs = self._outputs.read()
        self._log.add(outputs)
        if self._hang_detector is not None and self._stop is None and not self._over:
            if outputs:
                self._hang_detector.note_activity()
            if self._hang_detector.is_hung():
                self._on_hang(self._hang_detector.silence)
            elif ranks := self._hang_detector.long_wait():
                self._note_wait(*ranks)
        self._note_recompiles()
        if self._preemption.notice and self._stop is None:
            reason = f"this machine is about to be taken away: {self._preemption.notice}"
            self.stop(StopCause.PREEMPTED, reason)
        if self._deadline is not None and self._clock() > self._deadline:
            self._deadline = None
            self.stop(StopCause.TIMEOUT, f"--timeout {self.spec.timeout:g} s")
        if self._shutdown is not None and self._shutdown.advance():
            self._shutdown = None
        if not self._over:
            return False
        if self._shutdown is None and (left := self._all_processes()):
            log.info("left behind: %s", [process.pid for process in left])
            # Children that the user's code has left behind: no grace, nothing to save.
            self._shutdown = ShutdownSequence(
                [], self._all_processes, grace=0.0, on_step=_unsaid, clock=self._clock
            )
            return False
        if self._shutdown is None:
            self._finish()
            return True
        return False

    def _note_recompiles(self, *, last: bool = False) -> None:
        if self._recompile_notes is not None:
            for line in self._recompile_notes.read(last=last):
                self._emit(Note(line))
            if last:
                self._recompile_notes.close()

    def _note_wait(self, inside: list[int], outside: list[int]) -> None:
        """It may be meant (one rank evaluates), so the run goes on; on a TPU it could hang."""
        stacks.collect_stacks(self.dir, self._attempt, self._living_ranks(), native=False)
        where, _ = stacks.describe_stacks(self.dir, self.spec, self._attempt, self._ranks)
        waiting, missing = (", ".join(map(str, ranks)) for ranks in (inside, outside))
        self._emit(
            Note(
                f"waiting in a collective for {LONG_WAIT:g} s: {waiting}; not there: {missing}\n"
                f"{where}"
            )
        )

    def _living_ranks(self) -> dict[int, Process]:
        return {r: p for r, p in self._ranks.items() if p is not None and processes.is_alive(p)}

    def _work_done(self) -> dict[int, Work]:
        living = self._living_ranks()
        return {rank: processes.work_done(process) for rank, process in living.items()}

    def _on_hang(self, silence: float) -> None:
        """Say who waits where, while they still do, and stop them."""
        words = "no activity: collecting the stacks of all ranks"
        self._emit(Phase(PhaseKind.COLLECTING_STACKS, words))
        stacks.collect_stacks(self.dir, self._attempt, self._living_ranks())
        where, place = stacks.describe_stacks(self.dir, self.spec, self._attempt, self._ranks)
        timeout = self.spec.hang_timeout
        silent = f"no activity from any rank for {max(timeout, silence // timeout * timeout):g} s"
        self._hang = Failure(
            rank=None,
            pid=None,
            exitcode=None,
            signal=None,
            type="Hang",
            message=f"{silent} (a line, a metric, a step or a collective):\n{where}\n"
            "If nothing was wrong, give it more time with --hang-timeout.",
            cell=place.cell if place else None,
            line=place.line if place else None,
            traceback="",
            time=time.time(),
            kind=FailureKind.HANG,
        )
        self.stop(StopCause.HUNG, silent)

    def _finish(self) -> None:
        # What ranks wrote last is in the files by now: they are gone.
        while outputs := self._outputs.read():
            self._log.add(outputs)
        self._note_recompiles(last=True)
        self._preemption.close()
        self._outputs.close()
        self._log.close()
        if self._log.problem:
            self._emit(Note(f"run.log is not complete: {self._log.problem}"))
        if kept := self._kept():
            self._emit(Note(kept))
        result = self._result()
        try:
            self.dir.write_result(result)
        except OSError as error:
            log.error("result.json cannot be written: %s", error)
        for attempt in range(self._attempt + 1):
            for rank in (None, *range(self.spec.world_size)):
                files.release_blocks(self.dir.error(attempt, rank))
        if self._lock is not None:
            self._lock.close()
        processes.reap_adopted(self._spared())
        self._emit(Phase(PhaseKind.ENDED, result.state))
        self._emit(Ended(result.state))

    def _result(self) -> RunResult:
        """How it ended, or how the present attempt did."""
        observation = RunObservation(
            started=self._started,
            ended=time.time(),
            exits=self._exits,
            stop=self._stop,
            attempt=self._attempt,
            replicate=self._replicate,
            cell=self._cell,
            hang=self._hang,
            fork_server_output=self._fork_server_output,
        )
        return outcome.build_result(self.dir, self.spec, observation)


def _unsaid(step: str) -> None:
    """Steps against children left behind are not worth a line."""
