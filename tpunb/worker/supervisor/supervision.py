"""Supervises one run, from its turn on the device to the written result.

                                    retry after a failure
                                  ╭───────────────────────╮
                                  v                       │
    begin ──> runner forked ──> ranks forked ──> ranks exit ──> runner exits ──> over ──> finish
               ^   │   │              │           ^               ^                (processes left
               ╰───╯   │              v           │               │                behind are killed
       not forkable:   ╰─────> ShutdownSequence ──┴───────────────╯                in between)
       again, with replicate

The shutdown sequence begins with `stop` (user, time-out, hang, preemption, kernel gone, another
host), or when a rank has failed (StopRanks). A run that is stopped before `begin` is over at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Event, Note, Phase, RankEnded, RanksStarted, Stopping
from tpunb.runs.follow import Outputs
from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AllHere,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    CellStarted,
    HostEnded,
    HostHere,
    HostLost,
    ImportsFailed,
    Message,
    OrderChannel,
    PreludeNotForkable,
    RankExited,
    RanksForked,
    RefuseRun,
    RunnerExits,
    RunnerForked,
    RunOver,
    StartAttempt,
    StopRanks,
)
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind, PhaseKind, Stop, StopCause
from tpunb.runs.trained_models import read_models
from tpunb.utils import files, processes, records
from tpunb.utils.memory import OomDetector
from tpunb.utils.processes import Process, Work
from tpunb.worker.supervisor import outcome, stacks
from tpunb.worker.supervisor.chip_meter import MeterProcess, start_meter
from tpunb.worker.supervisor.hang_detector import LONG_WAIT, HangDetector
from tpunb.worker.supervisor.hosts import Hosts, Leader
from tpunb.worker.supervisor.outcome import ProcessExit, RunObservation
from tpunb.worker.supervisor.preemption import PreemptionWatcher
from tpunb.worker.supervisor.recompile_notes import RecompileNotes
from tpunb.worker.supervisor.run_log import RunLog
from tpunb.worker.supervisor.shutdown import ShutdownSequence

log = logging.getLogger(__name__)
MEMORY_EVERY = 1.0
"""Seconds between two measurements of ranks' memory, which are shown on another machine."""
MEMORY_STEP = 10_000_000
"""Bytes by which memory has to change before it is written again."""


class Supervision:
    """Follows the processes of one run, stops them, and writes the result.

    `fork_runner` has a runner forked; its argument is why every rank runs the prelude itself, or
    None. `spared` returns descendants of this process that do not belong to the run; while
    `copying`, another is about to join them, and nothing is signalled. `kept` describes what is
    kept of its prelude. Call `step` every few hundredths of a second, after
    passing on the messages received.

    With `hosts` this is one host of several: nothing begins before all are there, each attempt
    begins on all of them at once, a stop on one stops all, and host 0 writes the result when
    the last host has ended (tpunb.worker.supervisor.hosts).
    """

    def __init__(
        self,
        run: RunDir,
        fork_runner: Callable[[str | None], None],
        spared: Callable[[], Sequence[Process]],
        copying: Callable[[], bool],
        kept: Callable[[], str],
        *,
        hosts: Hosts | None = None,
        facts: Mapping[str, str] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dir = run
        self._lock = run.take_lock()
        self._fork_runner = fork_runner
        self._spared = spared
        self._copying = copying
        self._kept = kept
        self._env = env
        self._clock = clock
        self.spec = run.read_spec()
        self._started = time.time()
        self._deadline = None if self.spec.timeout is None else clock() + self.spec.timeout
        files.reserve_blocks(run.result)
        files.reserve_blocks(run.events, appended=True)
        files.reserve_blocks(run.log, appended=True)
        self._hosts = hosts
        self._node_rank = 0 if hosts is None else hosts.node_rank
        self._own = self.spec.ranks_on(self._node_rank)
        """The ranks of this host."""
        self._outputs = Outputs(run, self._own)
        self._log = RunLog(run)
        if self.spec.device == "CPU" and self._node_rank == 0:
            self._log.say("rehearsal on CPU: this run uses no TPU")
        self._oom = OomDetector()
        self._preemption = PreemptionWatcher()
        self._attempt = 0
        self._may_begin = False
        self._begun = False
        self._replicate = self.spec.replicate
        self._runner: Process | None = None
        self._runner_code: int | None = None
        """The exit code that the runner has announced."""
        self._runner_gone = False
        """The runner has ended; its last messages have yet to be read."""
        self._ranks: dict[int, Process | None] = {}
        self._pids: dict[int, int] = {}
        self._exits: list[ProcessExit] = []
        self._cell: int | None = None
        self._over = False
        """True once no process of this run can start or report anything."""
        self._stop: Stop | None = None
        self._stopped = math.inf
        self._shutdown: ShutdownSequence | None = None
        self._no_grace = False
        """No further shutdown sequence has a grace period."""
        self._signals_sent: set[str] = set()
        self._fork_server_output = ""
        self._imports_failed: ImportsFailed | None = None
        self._hang_detector: HangDetector | None = None
        self._recompile_notes: RecompileNotes | None = None
        self._hang: Failure | None = None
        self._hang_found = False
        """The run is hung; it is stopped when the stacks have been collected, or before."""
        self._stacks: stacks.StackCollection | None = None
        self._report_stacks: Callable[[], None] = lambda: None
        """Called once the stacks have been collected."""
        self._all_here = hosts is None
        """The prelude may begin."""
        self._decisions: OrderChannel | None = None
        """To the runner: the decisions for all hosts."""
        self._abandoned = ""
        """Why the current attempt was abandoned, as another host gave the reason."""
        self._gone_hosts: list[Failure] = []
        self._numbers_said = False
        self._memory: dict[int, int] = {}
        """The ranks' memory as last written, in MEMORY_STEPs."""
        self._memory_due = clock()
        self._meter: MeterProcess | None = None
        self._end_reported = False
        self._whole: RunResult | None = None
        """The result of all hosts, received from host 0."""
        self._idle = False
        """No rank of this host has shown any activity for the whole hang time-out."""
        if hosts is not None:
            hosts.say(HostHere(dict(facts)))

    def _emit(self, event: Event) -> None:
        """Write an event to the run folder. A full disk or a deleted folder ends no run."""
        log.info("%s", event)
        with contextlib.suppress(OSError):
            self.dir.emit(event)

    def begin(self) -> None:
        """Have a runner forked, unless the run was stopped before."""
        self._may_begin = True
        if self._over or not self._all_here:
            return
        self._begun = True
        self._fork_runner(self._replicate)

    def take_decisions(self, channel: OrderChannel) -> None:
        """Send the decisions for all hosts to the runner over this channel from now on."""
        self._decisions = channel

    def on_message(self, message: Message) -> None:
        """Handle a message of the fork server or the runner."""
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
            case AttemptReady() | AttemptFinished():
                if self._hosts is not None:
                    self._hosts.say(message)
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
            # Stopped while the runner was being forked: there was no process to signal yet.
            self._shut_down([self._runner])

    def _on_ranks_forked(self, attempt: int, pids: list[int]) -> None:
        if attempt > self._attempt:
            self._on_retry(attempt)
        self._attempt = attempt
        if self._meter is None:
            self._meter = start_meter(self.dir, self.spec.device, self._env)
        self._memory.clear()
        self._pids = dict(zip(self._own, pids, strict=True))
        self._ranks = {rank: processes.find_process(pid) for rank, pid in self._pids.items()}
        self._hang_detector = HangDetector(
            self.dir,
            attempt,
            self._own,
            self.spec.hang_timeout,
            self._work_done,
            prelude=self._replicate is not None,
            clock=self._clock,
        )
        self._note_recompiles(last=True)
        self._recompile_notes = RecompileNotes(self.dir, attempt, self._own)
        self._emit(RanksStarted(attempt, tuple(pids)))
        if self._stop is not None:
            # Stopped while the ranks were being forked: the running sequence does not know them.
            self._shut_down(list(self._ranks.values()))

    def _on_retry(self, attempt: int) -> None:
        """The ranks were started again: report why, and forget the attempt before."""
        failure = self._result().failure
        headline = self._abandoned or "a rank failed"
        headline = headline if failure is None else failure.headline()
        self._abandoned = ""
        self._drop_stacks()
        self._hang_found = False
        self._emit(Note(f"{headline}: starting again (retry {attempt} of {self.spec.retries})"))
        self._exits.clear()
        if self._stop is not None and self._stop.for_failed_peer:
            self._stop, self._stopped, self._shutdown = None, math.inf, None
            self._signals_sent.clear()
        # Processes that the user's code has left behind would take part in the next attempt.
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
        first = self._first_failed()
        reason = "a rank has failed"
        if first is not None:
            reason = f"rank {self.spec.name_rank(first)} has failed"
        if self._hosts is not None and not self._abandoned:
            self._hosts.say(AttemptFailed(self._attempt, reason))
        if self._stop is None:
            self._note_stop(Stop(StopCause.PEER_FAILED, reason))
        if self._shutdown is None:
            self._shut_down(list(self._ranks.values()))

    def _first_failed(self) -> int | None:
        """The first rank of this host to fail: it may have written its error and not ended yet."""
        ended = next((end.rank for end in self._exits if end.failed), None)
        if ended is not None:
            return ended
        errors = [self.dir.read_error(self._attempt, rank) for rank in self._ranks]
        failures = [failure for failure in errors if failure is not None]
        failures.sort(key=lambda failure: (failure.kind is FailureKind.PEER_LOST, failure.time))
        return failures[0].rank if failures else None

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
        # The runner exits with 1 after a rank has failed, and the rank itself has left an error.
        follows = code == 1 and by_itself and self._ranks and not self.dir.error(0, None).exists()
        ended_well = code == 0 and by_itself
        if not ended_well and not follows and not any(end.failed for end in self._exits):
            self._add_exit(code, None if runner is None else runner.pid, by_itself=by_itself)
        self._over = True

    def _add_exit(
        self, code: int, pid: int | None, *, by_itself: bool = False, fork_server: bool = False
    ) -> None:
        """Record the exit of the runner or of the fork server."""
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

    def lose_fork_server(self, code: int, output: str, why: ImportsFailed | None = None) -> None:
        """The fork server has ended: if the run has no runner yet, it is over."""
        if not self._over and self._runner is None:
            self._fork_server_output, self._imports_failed = output, why
            self._log.say(why.message if why is not None and why.of_tpunb else output)
            self._add_exit(code or 1, None, fork_server=True)
            self._over = True

    def _look_after_runner(self) -> None:
        """Handle the runner's end once all of its messages have been read."""
        if self._runner is None or processes.is_alive(self._runner):
            return
        if not self._runner_gone:
            self._runner_gone = True
            return
        status = processes.exit_code(self._runner.pid)
        if status is None and processes.is_zombie(self._runner.pid):
            return  # it ended before this process adopted it, which happens next
        code = self._runner_code if status is None else status
        by_itself = self._runner_code is not None
        self._on_runner_exit(-signal.SIGKILL if code is None else code, by_itself=by_itself)

    def stop(self, stop: Stop) -> None:
        """End the run on all hosts; with `stop.now`, at once, even if it is stopping already."""
        if stop.cause is StopCause.PREEMPTED and self._stop is not None:
            return  # perhaps the SIGTERM of the shutdown sequence, which a retry may follow
        if self._hosts is not None:
            self._hosts.say(stop)
        self._stop_here(stop)

    def _note_stop(self, stop: Stop) -> None:
        self._stop, self._stopped = stop, time.time()

    def _stop_here(self, stop: Stop) -> None:
        if self._hang_found and self._stacks is not None:
            self._finish_stacks()  # with the stacks that have arrived
        if self._stop is None or (
            self._stop.for_failed_peer and stop.cause is not StopCause.PEER_FAILED
        ):
            self._note_stop(stop)
        with contextlib.suppress(OSError):  # if it fails, a retry may begin, and is stopped too
            self.dir.stopping.touch()
        if not self._begun:
            self._over = True
        elif self._shutdown is None and not self._over:
            if self._ranks:
                self._shut_down(list(self._living_ranks().values()))
            elif self._runner is not None:
                self._shut_down([self._runner])
        if stop.now:
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
        """Report each step once in a run: a sequence restarted for ranks just forked is no news."""
        if step not in self._signals_sent:
            self._signals_sent.add(step)
            stop = self._stop or Stop()
            self._emit(Stopping(step, stop.reason, stop=stop.without_reason()))

    def _all_processes(self) -> list[Process]:
        """Every process of the run: all below the supervisor except the spared ones."""
        spared = [*self._spared(), None if self._meter is None else self._meter.process]
        return [p for p in processes.descendants(os.getpid()) if p not in spared]

    def step(self) -> bool:
        """Merge logs, check time limits, advance a shutdown. True once the run is finished."""
        self._hear_hosts()
        self._look_after_runner()
        outputs = self._outputs.read()
        self._log.add(outputs)
        if self._hang_detector is not None and self._stop is None and not self._over:
            if outputs:
                self._hang_detector.note_activity()
            self._idle = self._hang_detector.is_hung()
            if self._idle and (self._hosts is None or self._hosts.all_idle()):
                self._on_hang(self._hang_detector.silence)
            elif self._stacks is None and (ranks := self._hang_detector.long_wait()):
                self._collect_wait(*ranks)
        self._advance_stacks()
        self._note_recompiles()
        self._say_numbers()
        self._tell_memory()
        if self._preemption.notice:
            reason = f"this machine is about to be shut down: {self._preemption.notice}"
            self.stop(Stop(StopCause.PREEMPTED, reason))
        if self._deadline is not None and self._clock() > self._deadline:
            self._deadline = None
            self.stop(Stop(StopCause.TIMEOUT, f"--timeout {self.spec.timeout:g} s"))
        if self._copying():  # a copy that is not known yet would be ended with the run
            return False
        if self._shutdown is not None and self._shutdown.advance():
            self._shutdown = None
        if not self._over:
            return False
        if self._shutdown is None and (left := self._all_processes()):
            log.info("left behind: %s", [process.pid for process in left])
            # Children that the user's code has left behind: no grace period, nothing to save.
            self._shutdown = ShutdownSequence(
                [], self._all_processes, grace=0.0, on_step=_unreported, clock=self._clock
            )
            return False
        if self._shutdown is None and self._all_have_ended():
            self._finish()
            return True
        return False

    def _hear_hosts(self) -> None:
        """Carry out host 0's decisions."""
        if self._hosts is None:
            return
        self._hosts.step(idle=self._idle)
        for decision in self._hosts.hear():
            match decision:
                case AllHere():
                    self._all_here = True
                    if self._may_begin:
                        self.begin()
                case StartAttempt() | AllFinished():
                    self._tell_runner(decision)
                case AbandonAttempt(_, reason):
                    self._abandoned = reason
                    self._tell_runner(decision)
                    if self._stop is None:
                        self._note_stop(Stop(StopCause.PEER_FAILED, reason))
                    if self._shutdown is None and (living := self._living_ranks()):
                        self._shut_down(list(living.values()))
                case Stop(StopCause.HUNG) if self._stop is None and self._hang_detector:
                    self._on_hang(self._hang_detector.silence, everywhere=True)
                case Stop():
                    self._stop_here(decision)
                case HostLost():
                    self._on_host_lost(decision)
                case RefuseRun(reason):
                    self._gone_hosts.append(Failure.of(FailureKind.REFUSED, reason))
                    self._stop_here(Stop(StopCause.HOST_LOST, reason, now=True))
                case RunOver(result):
                    self._whole = RunResult.from_json(result, self.dir.path)
                    if not self._end_reported:  # stopped before it was host 0's turn
                        self._stop_here(Stop(StopCause.HOST_LOST, "the run is over", now=True))

    def _tell_runner(self, decision: Message) -> None:
        if self._decisions is not None:
            with contextlib.suppress(OSError):  # `step` notices a dead runner
                self._decisions.send(decision)

    def _on_host_lost(self, lost: HostLost) -> None:
        host = self.spec.hosts[lost.node_rank]
        failure = Failure.of(FailureKind.HOST_LOST, lost.reason, time=lost.time, host=host)
        self._gone_hosts.append(failure)
        self._stop_here(Stop(StopCause.HOST_LOST, lost.reason))

    def _all_have_ended(self) -> bool:
        """True on one host. On several: report this host's end once; True when all have ended."""
        if self._hosts is None:
            return True
        if not self._end_reported:
            self._end_reported = True
            self._read_last_outputs()
            models = read_models(self.dir.models(self._attempt, self._own[0]))
            ended = HostEnded(self._result().to_json(), time.time(), [*map(asdict, models)])
            self._hosts.say(ended)
        return self._hosts.over

    def _say_numbers(self) -> None:
        """On several hosts, once: log the numbers of each rank in torchrun and in the backend."""
        if self._hosts is None or self._numbers_said or not self._ranks:
            return
        paths = {rank: self.dir.numbers(self._attempt, rank) for rank in self._own}
        if not all(path.exists() for path in paths.values()):
            return
        self._numbers_said = True
        parts = []
        for rank, path in paths.items():
            numbers = records.read_dict(path)
            ordinal = numbers.get("ordinal")
            known = "" if ordinal is None else f", ordinal {ordinal}"
            parts.append(f"rank {rank} (local rank {numbers.get('local_rank')}{known})")
        self._log.say(f"{self.spec.hosts[self._node_rank]}: {', '.join(parts)}")

    def _tell_memory(self) -> None:
        """On several hosts: write how much memory each rank of this host uses."""
        if self._hosts is None or self._clock() < self._memory_due:
            return
        self._memory_due = self._clock() + MEMORY_EVERY
        for rank, process in self._living_ranks().items():
            steps = processes.resident_bytes(process.pid) // MEMORY_STEP
            if steps != self._memory.get(rank):
                self._memory[rank] = steps
                with contextlib.suppress(OSError):  # a full disk: the memory is not shown
                    files.write_json(self.dir.memory(self._attempt, rank), steps * MEMORY_STEP)

    def _note_recompiles(self, *, last: bool = False) -> None:
        if self._recompile_notes is not None:
            for line in self._recompile_notes.read(last=last):
                self._emit(Note(line))
            if last:
                self._recompile_notes.close()

    def _collect_wait(self, inside: list[int], outside: list[int]) -> None:
        """Collect the stacks of a long wait, for a report.

        The wait may be intended (one rank evaluates), so the run is not stopped. On a TPU the same
        code could hang.
        """
        self._collect_stacks(lambda: self._note_wait(inside, outside), native=False)

    def _note_wait(self, inside: list[int], outside: list[int]) -> None:
        where, _ = stacks.describe_stacks(self.dir, self.spec, self._attempt, self._ranks)
        waiting, missing = (self.spec.name_ranks(ranks) for ranks in (inside, outside))
        self._emit(
            Note(
                f"waiting in a collective for {LONG_WAIT:g} s: {waiting}; not in it: {missing}\n"
                f"{where}"
            )
        )

    def _collect_stacks(self, report: Callable[[], None], *, native: bool) -> None:
        self._drop_stacks()  # of a long wait: a hang's report includes them
        self._report_stacks = report
        self._stacks = stacks.StackCollection(
            self.dir, self._attempt, self._living_ranks(), native=native, clock=self._clock
        )

    def _advance_stacks(self) -> None:
        """Report collected stacks. A hang is reported early if something else stops the run."""
        if self._stacks is None:
            return
        if self._over or (self._stop is not None and not self._hang_found):
            self._drop_stacks()
        elif self._stacks.advance() or self._stop is not None:
            self._finish_stacks()

    def _finish_stacks(self) -> None:
        self._drop_stacks()
        self._report_stacks()

    def _drop_stacks(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
            self._stacks = None

    def _living_ranks(self) -> dict[int, Process]:
        return {r: p for r, p in self._ranks.items() if p is not None and processes.is_alive(p)}

    def _work_done(self) -> dict[int, Work]:
        living = self._living_ranks()
        return {rank: processes.work_done(process) for rank, process in living.items()}

    def _on_hang(self, silence: float, *, everywhere: bool = False) -> None:
        """Find out which ranks wait where, while they still do, and then stop them.

        `everywhere`: host 0 has found that no host is active.
        """
        if self._hang_found:
            return
        words = "no activity: collecting the stacks of all ranks"
        if self._hosts is not None and not everywhere:  # all hosts collect at the same time
            self._hosts.say(Stop(StopCause.HUNG, words))
        self._emit(Phase(PhaseKind.COLLECTING_STACKS, words))
        self._hang_found = True
        self._collect_stacks(lambda: self._stop_hung(silence), native=True)

    def _stop_hung(self, silence: float) -> None:
        """Report which ranks wait where, and stop them."""
        where, place = stacks.describe_stacks(self.dir, self.spec, self._attempt, self._ranks)
        timeout = self.spec.hang_timeout
        silent = f"no activity from any rank for {max(timeout, silence // timeout * timeout):g} s"
        self._hang = Failure.of(
            FailureKind.HANG,
            f"{silent} (a line, a metric, a step or a collective):\n{where}\n"
            "If nothing was wrong, give the run more time with --hang-timeout.",
            cell=place.cell if place else None,
            line=place.line if place else None,
            traceback=where if self._hosts is not None else "",
        )
        self._stop_here(Stop(StopCause.HUNG, silent))

    def _read_last_outputs(self) -> None:
        """Read the rest of the ranks' output: they are gone, so it is complete."""
        while outputs := self._outputs.read():
            self._log.add(outputs)
        self._note_recompiles(last=True)

    def _finish(self) -> None:
        self._read_last_outputs()
        self._preemption.close()
        if self._meter is not None:
            self._meter.close()
        self._outputs.close()
        self._log.close()
        if self._log.problem:
            self._emit(Note(f"run.log is not complete: {self._log.problem}"))
        if kept := self._kept():
            self._emit(Note(kept, minor=True))
        result = self._whole or self._result()
        if isinstance(self._hosts, Leader):
            result = outcome.merge_results(result, self._stop, self._stopped, self._hosts.results())
        try:
            self.dir.write_result(result)
        except OSError as error:
            log.error("result.json cannot be written: %s", error)
        if self._hosts is not None:
            self._hosts.close(RunOver(result.to_json()))
        for attempt in range(self._attempt + 1):
            for rank in (None, *self._own):
                files.release_blocks(self.dir.error(attempt, rank))
        if self._lock is not None:
            self._lock.close()
        processes.reap_adopted(self._spared())
        self._emit(Phase(PhaseKind.ENDED, result.state))
        self._emit(Ended(result.state))

    def _result(self) -> RunResult:
        """The result of the run, or of the current attempt."""
        observation = RunObservation(
            started=self._started,
            ended=time.time(),
            exits=self._exits,
            stop=self._stop,
            stopped=self._stopped,
            attempt=self._attempt,
            replicate=self._replicate,
            cell=self._cell,
            hang=self._hang,
            fork_server_output=self._fork_server_output,
            imports_failed=self._imports_failed,
            ranks=self._own,
            host=self.spec.hosts[self._node_rank] if self._hosts is not None else None,
            host_failures=tuple(self._gone_hosts),
        )
        return outcome.build_result(self.dir, self.spec, observation)


def _unreported(step: str) -> None:
    """Ignore a step: steps against children left behind are not worth a line."""
