"""Supervises one run, from its turn on the device to the written result.

                                    retry after a failure
                                  ╭───────────────────────╮
                                  v                       │
    begin ──> runner forked ──> ranks forked ──> ranks exit ──> runner exits ──> over ──> finish
               ^   │   │              │           ^               ^                (processes left
               ╰───╯   │              v           │               │                behind are killed
       not forkable:   ╰─────> shutdown sequence ─┴───────────────╯                in between)
       again, with replicate

The shutdown sequence begins with `stop` (user, time-out, hang, preemption, kernel gone, a host that
is lost), or when a rank has failed (StopRanks). A run that is stopped before `begin` is over at
once. The processes are those of a node (tpunb.worker.supervisor.nodes): this machine, or the hosts
of a pod. What is decided and written here does not depend on where a rank is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from tpunb.runs.directory import RunDir
from tpunb.runs.events import (
    Ended,
    Event,
    Figure,
    Note,
    Phase,
    RankEnded,
    RanksStarted,
    Resumed,
    Stopping,
)
from tpunb.runs.follow import Outputs
from tpunb.runs.protocol import (
    AttemptFinished,
    AttemptReady,
    CellStarted,
    NodeHere,
    Preempted,
    PreludeNotForkable,
    RankExited,
    RanksForked,
    RankState,
    RunnerEnded,
    SignalSent,
    StacksCollected,
    StopRanks,
)
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind, PhaseKind, RunSpec, Stop, StopCause
from tpunb.utils import files
from tpunb.utils.processes import Work
from tpunb.worker.supervisor import outcome, stacks
from tpunb.worker.supervisor.hang_detector import HangDetector
from tpunb.worker.supervisor.nodes import Node, NodeLost, Report
from tpunb.worker.supervisor.outcome import ProcessExit, RunObservation
from tpunb.worker.supervisor.recompile_notes import RecompileNotes
from tpunb.worker.supervisor.remote_node import Hosts, RefusedError, Rendezvous
from tpunb.worker.supervisor.run_log import RunLog

log = logging.getLogger(__name__)
REMOTE_OUTPUT = 0.1
"""Seconds between two reads of the output of several hosts' ranks, which may be hundreds."""


class Supervision:
    """Follows the processes of one run, stops them, and writes the result.

    `kept` describes what is kept of its prelude. `hosts`: those of a run on several hosts, whose
    nodes are `nodes`. Call `step` every few hundredths of a second, after passing on the messages
    received.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        nodes: Sequence[Node],
        kept: Callable[[], str] = str,
        *,
        hosts: Hosts | None = None,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dir = run
        self.nodes = nodes
        self._lock = run.take_lock()
        self._kept = kept
        self._hosts = hosts
        self._clock = clock
        self.spec = spec
        self._started = time.time()
        self._deadline = None if self.spec.timeout is None else clock() + self.spec.timeout
        files.reserve_blocks(run.result)
        files.reserve_blocks(run.events, appended=True)
        files.reserve_blocks(run.log, appended=True)
        self._rendezvous = Rendezvous(nodes, address)
        for node in nodes:
            node.report = partial(self._on_report, node)
        self._every_rank = range(self.spec.world_size)
        self._outputs = Outputs(run, self._every_rank)
        self._outputs_due = clock()
        self._log = RunLog(run)
        if self.spec.device == "CPU":
            self._log.say("rehearsal on CPU: this run uses no TPU")
        self._attempt = 0
        self._begun = False
        self._replicate = self.spec.replicate
        self._pids: dict[int, int] = {}
        self._forked: set[int] = set()
        """The nodes whose ranks of this attempt were forked."""
        self._exits: list[ProcessExit] = []
        self._cell: int | None = None
        self._stop: Stop | None = None
        self._stopped = math.inf
        self._signals_sent: dict[int, set[str]] = {node.number: set() for node in nodes}
        self._noted: set[str] = set()
        """Notes of hosts that were shown."""
        self._hang_detector: HangDetector | None = None
        self._recompile_notes: RecompileNotes | None = None
        self._hang: Failure | None = None
        self._silence: float | None = None
        """Seconds of it in a run that is hung, which is stopped with the stacks of its ranks."""
        self._collecting: set[int] = set()
        """The nodes whose stacks are being collected."""
        self._host_failures: list[Failure] = []
        self._fetches = True

    @property
    def _over(self) -> bool:
        """True once no process of this run can start or report anything."""
        return all(node.ended for node in self.nodes)

    @property
    def waits(self) -> bool:
        """True while nothing is under way on this machine but the run's own code."""
        return self._hosts is None and self._stop is None and not (self._collecting or self._over)

    def _emit(self, event: Event) -> None:
        """Write an event to the run folder. A full disk or a deleted folder ends no run."""
        log.info("%s", event)
        with contextlib.suppress(OSError):
            self.dir.emit(event)

    def begin(self) -> None:
        """Have a runner forked, unless the run was stopped before."""
        if not self._over:
            self._begun = True
            for node in self.nodes:
                node.fork_runner(self._replicate)

    def _begin_on_hosts(self, hosts: Hosts) -> None:
        """Begin once all hosts are here."""
        try:
            if hosts.can_begin():
                self.begin()
        except RefusedError as error:
            self._host_failures += error.failures
            self.stop(Stop(StopCause.HOST_LOST, str(error), now=True))

    def _on_report(self, node: Node, report: Report) -> None:
        """Handle what a node has reported."""
        match report:
            case CellStarted(number) if node.number == 0:
                self._cell = number
            case RanksForked(attempt, pids):
                self._on_ranks_forked(node, attempt, pids)
            case RankExited():
                self._on_rank_exit(node, report)
            case StopRanks():
                self._on_stop_ranks(node)
            case AttemptReady() | AttemptFinished():
                self._rendezvous.take(node, report)
            case PreludeNotForkable(reason) if self._replicate is None:
                self._replicate, self._cell = reason, None
                if self._stop is None:
                    self._emit(
                        Note(f"{reason}: every rank runs the cells above itself (replicate)")
                    )
            case RunnerEnded():
                self._on_runner_end(node, report)
            case SignalSent(step, at):
                self._on_signal_sent(node, step, at)
            case StacksCollected():
                self._on_stacks(node)
            case Preempted(notice):
                name = self.spec.hosts[node.number] if self._hosts else "this machine"
                reason = f"{name} is about to be shut down: {notice}"
                self.stop(Stop(StopCause.PREEMPTED, reason))
            case NodeHere(facts) if self._hosts is not None:
                self._hosts.take_facts(node, facts)
            case NodeLost(reason, at):
                self._on_node_lost(node, reason, at)
            case Note(text):
                if text not in self._noted:
                    self._noted.add(text)
                    self._emit(report)
            case Phase() | Figure() | Resumed():
                self._emit(report)

    def _on_ranks_forked(self, node: Node, attempt: int, pids: list[int]) -> None:
        if attempt > self._attempt:
            self._on_retry(attempt)
        self._attempt = attempt
        self._forked.add(node.number)
        self._pids.update(zip(node.ranks, pids, strict=False))
        if len(self._forked) < len(self.nodes):
            return
        self._hang_detector = HangDetector(
            self.dir,
            attempt,
            self._every_rank,
            self.spec.hang_timeout,
            self._work_done,
            prelude=self._replicate is not None,
            clock=self._clock,
        )
        self._note_recompiles(last=True)
        self._recompile_notes = RecompileNotes(self.dir, attempt, self._every_rank)
        # The hosts' pids mean nothing on this machine.
        known = tuple(0 if self._hosts else self._pids.get(rank, 0) for rank in self._every_rank)
        self._emit(RanksStarted(attempt, known))

    def _on_retry(self, attempt: int) -> None:
        """The ranks were started again: report why, and forget the attempt before."""
        failure = self._result().failure
        headline = "a rank failed" if failure is None else failure.headline()
        self._drop_stacks()
        self._silence = None
        self._emit(Note(f"{headline}: starting again (retry {attempt} of {self.spec.retries})"))
        self._exits.clear()
        self._forked.clear()
        self._pids.clear()
        if self._stop is not None and self._stop.for_failed_peer:
            self._stop, self._stopped = None, math.inf
            for sent in self._signals_sent.values():
                sent.clear()

    def _on_rank_exit(self, node: Node, message: RankExited) -> None:
        end = ProcessExit(
            message.rank,
            self._pids.get(message.rank),
            message.code,
            message.time,
            message.peak,
            node=node.number,
            memory=message.memory,
            signals_sent=frozenset(self._signals_sent[node.number]),
            finished=message.finished,
        )
        self._exits.append(end)
        self._emit(RankEnded(self._attempt, message.rank, message.code, message.time, message.peak))
        if end.failed and len(self.nodes) > 1:  # its agent may have no other rank to end
            self._on_stop_ranks(node)

    def _on_stop_ranks(self, node: Node) -> None:
        """A rank has failed: end the others of this attempt, on all nodes."""
        if self._stop is None:
            first = self._first_failed()
            name = "a rank" if first is None else f"rank {self.spec.name_rank(first)}"
            self._note_stop(Stop(StopCause.PEER_FAILED, f"{name} has failed"))
        self._rendezvous.take(node, StopRanks())
        for each in self.nodes:
            each.shut_down(self._grace, of_attempt=True)

    @property
    def _grace(self) -> float:
        """Seconds for the ranks to save."""
        return 0.0 if self._stop is not None and self._stop.now else self.spec.grace

    def _first_failed(self) -> int | None:
        """The first rank to fail: it may have written its error and not ended yet."""
        ended = next((end.rank for end in self._exits if end.failed), None)
        if ended is not None:
            return ended
        errors = [self.dir.read_error(self._attempt, rank) for rank in self._every_rank]
        failures = [failure for failure in errors if failure is not None]
        failures.sort(key=lambda failure: (failure.kind is FailureKind.PEER_LOST, failure.time))
        return failures[0].rank if failures else None

    def _on_runner_end(self, node: Node, message: RunnerEnded) -> None:
        if message.fork_server:
            why = message.imports_failed
            self._log.say(why.message if why is not None and why.of_tpunb else message.output)
        # The runner exits with 1 after a rank has failed, and the rank itself has left an error.
        prelude = self.dir if node.number == 0 else self.dir.host(node.number)
        follows = (
            message.code == 1
            and message.by_itself
            and (message.ranks_forked or self._stop is not None)
            and not prelude.error(0, None).exists()
        )
        ended_well = message.code == 0 and message.by_itself
        explained = any(end.failed and end.node == node.number for end in self._exits)
        if not ended_well and not follows and not explained:
            self._exits.append(
                ProcessExit(
                    None,
                    message.pid,
                    message.code,
                    message.time,
                    node=node.number,
                    memory=message.memory,
                    signals_sent=frozenset(self._signals_sent[node.number]),
                    finished=message.by_itself,
                    ranks_forked=message.ranks_forked,
                    fork_server_output=message.output if message.fork_server else None,
                    imports_failed=message.imports_failed,
                )
            )
        if self._hosts is not None and self._stop is None and not self._rendezvous.all_finished:
            name = self.spec.hosts[node.number]
            self.stop(Stop(StopCause.PEER_FAILED, f"{name} has ended before the others"))

    def _on_node_lost(self, node: Node, reason: str, at: float) -> None:
        self._collecting.discard(node.number)
        self._fail_host(node, reason, at)

    def _fail_host(self, node: Node, reason: str, at: float) -> None:
        name = self.spec.hosts[node.number]
        text = f"host {name} {reason}"
        log.warning("%s", text)
        self._host_failures.append(Failure.of(FailureKind.HOST_LOST, text, time=at, host=name))
        self.stop(Stop(StopCause.HOST_LOST, text))

    def stop(self, stop: Stop) -> None:
        """End the run; with `stop.now`, at once, even if it is stopping already."""
        if stop.cause is StopCause.PREEMPTED and self._stop is not None:
            return  # perhaps the SIGTERM of the shutdown sequence, which a retry may follow
        if self._collecting:
            self._drop_stacks()
            self._stop_hung()  # with the stacks that have arrived
        if all(node.over for node in self.nodes):
            self._fetches = False  # there is nothing else to stop
        self._shut_down(stop)

    def _note_stop(self, stop: Stop) -> None:
        # What follows from the end of a peer follows from a stop, too, if another comes later.
        self._stop, self._stopped = stop, min(self._stopped, time.time())

    def _shut_down(self, stop: Stop) -> None:
        if self._stop is None or (
            self._stop.for_failed_peer and stop.cause is not StopCause.PEER_FAILED
        ):
            self._note_stop(stop)
        grace = 0.0 if stop.now else self._grace
        for node in self.nodes:
            node.shut_down(grace)

    def _on_signal_sent(self, node: Node, step: str, at: float) -> None:
        """Report each step once in a run: a sequence restarted for ranks just forked is no news."""
        if self._stop is None:  # it was terminated there, or has not heard this process for long
            self._fail_host(node, "has stopped its ranks by itself", at)
            self._stopped = at
        is_news = not any(step in sent for sent in self._signals_sent.values())
        self._signals_sent[node.number].add(step)
        if is_news:
            stop = self._stop or Stop()
            self._emit(Stopping(step, stop.reason, stop=stop.without_reason()))

    def step(self) -> bool:
        """Merge logs, check time limits, advance a shutdown. True once the run is finished."""
        if self._hosts is not None and not self._begun and self._stop is None:
            self._begin_on_hosts(self._hosts)
        for node in self.nodes:
            node.step()
        outputs = []
        if self._clock() >= self._outputs_due:
            self._outputs_due = self._clock() + (REMOTE_OUTPUT if self._hosts else 0.0)
            outputs = self._outputs.read()
            self._log.add(outputs)
        if self._hang_detector is not None and self._stop is None and not self._over:
            if outputs:
                self._hang_detector.note_activity()
            if self._hang_detector.is_hung():
                self._on_hang(self._hang_detector.silence)
        if self._collecting and self._over:
            self._drop_stacks()
        self._note_recompiles()
        if self._deadline is not None and self._clock() > self._deadline:
            self._deadline = None
            self.stop(Stop(StopCause.TIMEOUT, f"--timeout {self.spec.timeout:g} s"))
        if not all(node.over for node in self.nodes):
            return False
        if self._hosts is not None:
            wanted = self._begun and self._fetches and not self._host_failures
            if not self._hosts.has_fetched(wanted=wanted):
                return False
        self._finish()
        return True

    def _note_recompiles(self, *, last: bool = False) -> None:
        if self._recompile_notes is not None:
            for line in self._recompile_notes.read(last=last):
                self._emit(Note(line))
            if last:
                self._recompile_notes.close()

    def _states(self) -> list[RankState]:
        return [state for node in self.nodes for state in node.states()]

    def _on_stacks(self, node: Node) -> None:
        """Stop the hung run once the stacks of all nodes are there."""
        if node.number in self._collecting:
            self._collecting.remove(node.number)
            if not self._collecting:
                self._stop_hung()

    def _drop_stacks(self) -> None:
        self._collecting.clear()
        for node in self.nodes:
            node.drop_stacks()

    def _work_done(self) -> dict[int, Work]:
        return {s.rank: Work(s.seconds, s.bytes) for s in self._states() if s.state}

    def _on_hang(self, silence: float) -> None:
        """Find out which ranks wait where, while they still do, and then stop them."""
        if self._silence is not None:
            return
        self._emit(
            Phase(PhaseKind.COLLECTING_STACKS, "no activity: collecting the stacks of all ranks")
        )
        timeout = self.spec.hang_timeout
        self._silence = max(timeout, silence // timeout * timeout)
        for node in self.nodes:
            if not node.ended:
                self._collecting.add(node.number)
                node.collect_stacks()

    def _stop_hung(self) -> None:
        """Report which ranks wait where, and stop them."""
        states = {state.rank: state.state for state in self._states()}
        where, place = stacks.describe_stacks(self.dir, self.spec, self._attempt, states)
        silent = f"no activity from any rank for {self._silence:g} s"
        self._hang = Failure.of(
            FailureKind.HANG,
            f"{silent} (a line, a metric, a step or a collective):\n{where}\n"
            "If nothing was wrong, give the run more time with --hang-timeout.",
            cell=place.cell if place else None,
            line=place.line if place else None,
        )
        self._shut_down(Stop(StopCause.HUNG, silent))

    def _read_last_outputs(self) -> None:
        """Read the rest of the ranks' output: they are gone, so it is complete."""
        while outputs := self._outputs.read():
            self._log.add(outputs)
        self._note_recompiles(last=True)

    def _finish(self) -> None:
        self._read_last_outputs()
        self._outputs.close()
        self._log.close()
        if self._log.problem:
            self._emit(Note(f"run.log is not complete: {self._log.problem}"))
        for host in () if self._hosts is None else self._hosts.nodes:
            if host.problem:
                self._emit(Note(f"the copy of {host.name}'s files is incomplete: {host.problem}"))
        if kept := self._kept():
            self._emit(Note(kept, minor=True))
        result = self._result()
        try:
            self.dir.write_result(result)
        except OSError as error:
            log.error("result.json cannot be written: %s", error)
        for attempt in range(self._attempt + 1):
            for rank in (None, *self._every_rank):
                files.release_blocks(self.dir.error(attempt, rank))
        if self._lock is not None:
            self._lock.close()
        for node in self.nodes:
            node.close()
        if self._hosts is not None:
            self._hosts.close()
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
            host_failures=tuple(self._host_failures),
        )
        return outcome.build_result(self.dir, self.spec, observation)
