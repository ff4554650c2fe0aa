"""The machines of a run, as its supervision sees them: processes that start, end and report.

    Node           what the supervision orders: fork a runner, shut down, collect stacks
      LocalNode    this machine: the run's processes are below this process
      RemoteNode   a host of a pod: `tpunb node`, which has a LocalNode, behind an ssh pipe
                   (tpunb.worker.supervisor.remote_node)

A node decides nothing. Whatever happens on it is reported as a message of tpunb.runs.protocol.
Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Event
from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    ImportsFailed,
    Message,
    OrderChannel,
    Preempted,
    PreludeNotForkable,
    RankExited,
    RanksForked,
    RankState,
    RunnerEnded,
    RunnerExits,
    RunnerForked,
    ShutDown,
    SignalSent,
    StacksCollected,
    StartAttempt,
)
from tpunb.utils import processes
from tpunb.utils.memory import OomDetector
from tpunb.utils.processes import Process
from tpunb.worker.supervisor.chip_meter import MeterProcess, start_meter
from tpunb.worker.supervisor.preemption import PreemptionWatcher
from tpunb.worker.supervisor.shutdown import ShutdownSequence
from tpunb.worker.supervisor.stacks import StackCollection

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Decision = StartAttempt | AbandonAttempt | AllFinished


@dataclass(frozen=True)
class NodeLost:
    """A host has vanished, or its `tpunb node` has ended without having finished."""

    reason: str
    """'was lost: …'."""
    time: float
    """The time of its last sign of life."""


Report = Message | NodeLost | Event


class Node(ABC):
    """One machine of a run."""

    def __init__(self, number: int, ranks: range) -> None:
        self.number = number
        """Its node rank."""
        self.ranks = ranks
        """The (global) ranks on it."""
        self.report: Callable[[Report], None] = lambda report: None
        """Called with what has happened; set by the supervision."""
        self.ended = False
        """True once no process of the run can start or report anything on this machine."""
        self.over = False
        """True once, in addition, no process of the run is left on it."""

    @abstractmethod
    def fork_runner(self, replicate: str | None) -> None:
        """Have a runner made; the argument is why every rank runs the prelude itself, or None."""

    @abstractmethod
    def decide(self, decision: Decision) -> None:
        """Pass on to the runner what was decided for all hosts."""

    @abstractmethod
    def shut_down(self, grace: float, *, of_attempt: bool = False) -> None:
        """Begin the shutdown sequence, or continue it: see `ShutDown`."""

    @abstractmethod
    def collect_stacks(self) -> None:
        """Have the living ranks write their stacks; `StacksCollected` is reported at the end."""

    def drop_stacks(self) -> None:  # noqa: B027 (nothing to do behind a pipe)
        """Give up the stacks that have not arrived."""

    @abstractmethod
    def states(self) -> list[RankState]:
        """What the ranks of the current attempt do."""

    @abstractmethod
    def step(self) -> None:
        """Read, report and advance what is under way; never waits."""

    @abstractmethod
    def close(self) -> None:
        """Release what belongs to the run, whose processes have ended."""


class LocalNode(Node):
    """This machine: the processes of one run below this process.

    `fork_runner` has a runner made; its argument is why every rank runs the prelude itself, or
    None. `spared` returns descendants of this process that do not belong to the run; while
    `copying`, another is about to join them, and nothing is signalled.
    """

    def __init__(
        self,
        number: int,
        ranks: range,
        run: RunDir,
        fork_runner: Callable[[str | None], None],
        spared: Callable[[], Sequence[Process]],
        copying: Callable[[], bool],
        *,
        device: str = "CPU",
        env: Mapping[str, str],
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(number, ranks)
        self._dir = run
        self._fork_runner = fork_runner
        self._spared = spared
        self._copying = copying
        self._device = device
        self._env = env
        self._clock = clock
        self._oom = OomDetector()
        self.preemption = PreemptionWatcher()
        self._preempted = False
        self._meter: MeterProcess | None = None
        self._begun = False
        self._attempt = 0
        self._runner: Process | None = None
        self._runner_code: int | None = None
        """The exit code that the runner has announced."""
        self._runner_gone = False
        """The runner has ended; its last messages have yet to be read."""
        self._not_forkable: str | None = None
        self._decisions: OrderChannel | None = None
        """To the runner: the decisions for all hosts."""
        self._ranks: dict[int, Process | None] = {}
        self._pids: dict[int, int] = {}
        self._order: ShutDown | None = None
        """To be carried out for processes that are forked later, too."""
        self._grace = math.inf
        self._shutdown: ShutdownSequence | None = None
        self._stacks: StackCollection | None = None

    # Orders

    def fork_runner(self, replicate: str | None) -> None:
        if not self.ended:
            self._begun = True
            self._fork_runner(replicate)

    def take_decisions(self, channel: OrderChannel) -> None:
        """Send the decisions for all hosts to the runner over this channel from now on."""
        self._decisions = channel

    def decide(self, decision: Decision) -> None:
        if self._decisions is not None:
            with contextlib.suppress(OSError):  # `step` notices a dead runner
                self._decisions.send(decision)

    def shut_down(self, grace: float, *, of_attempt: bool = False) -> None:
        if not of_attempt:
            with contextlib.suppress(OSError):  # if it fails, a retry may begin, and is stopped too
                self._dir.stopping.touch()
        if self._order is None or not of_attempt:
            self._order = ShutDown(grace, of_attempt)
        self._grace = min(self._grace, grace)
        if not self._begun:
            self.ended = True
        elif self._shutdown is not None:
            if grace == 0:
                self._shutdown.skip_grace_period()
        elif not self.ended:
            if self._ranks:
                self._begin_shutdown(list(self._living().values()))
            elif self._runner is not None:
                self._begin_shutdown([self._runner])

    def _begin_shutdown(self, first: list[Process | None]) -> None:
        self._shutdown = ShutdownSequence(
            [process for process in first if process is not None],
            self._processes_to_end,
            parent=self._runner,
            grace=self._grace,
            on_step=lambda step: self.report(SignalSent(step, time.time())),
            clock=self._clock,
        )

    def collect_stacks(self) -> None:
        self._stacks = StackCollection(self._dir, self._attempt, self._living(), clock=self._clock)

    def drop_stacks(self) -> None:
        self._stacks = None

    # Processes

    def _living(self) -> dict[int, Process]:
        return {r: p for r, p in self._ranks.items() if p is not None and processes.is_alive(p)}

    def _all_processes(self) -> list[Process]:
        """Every process of the run: all below this process except the spared ones."""
        spared = [*self._spared(), None if self._meter is None else self._meter.process]
        return [p for p in processes.descendants(os.getpid()) if p not in spared]

    def _processes_to_end(self) -> list[Process]:
        """All of the run; if only an attempt is ended, not what the runner has forked since."""
        left = self._all_processes()
        if self._order is None or not self._order.of_attempt or self._runner is None:
            return left
        ranks = [process for process in self._ranks.values() if process is not None]
        known = {*ranks, *(each for rank in ranks for each in processes.descendants(rank.pid))}
        later = [p for p in processes.descendants(self._runner.pid) if p not in known]
        return [process for process in left if process not in later]

    def states(self) -> list[RankState]:
        living = self._living()
        work = processes.work_done(list(living.values()))
        found = []
        for rank in self._ranks:
            process = living.get(rank)
            if process is None:
                found.append(RankState(rank, "", 0.0, 0, 0))
                continue
            done, state = work[process], processes.process_state(process)
            memory = processes.resident_bytes(process.pid)
            found.append(RankState(rank, state, done.seconds, done.bytes, memory))
        return found

    def on_message(self, message: Message) -> None:
        """Handle a message of the runner, and report it."""
        match message:
            case RunnerForked(pid):
                self._on_runner_forked(pid)
            case RanksForked(attempt, pids):
                self._on_ranks_forked(attempt, pids)
            case RankExited(rank, code) if code == -signal.SIGKILL and rank in self._pids:
                message = replace(message, memory=self._oom.evidence(self._pids[rank]))
            case PreludeNotForkable(reason):
                self._not_forkable = reason
            case RunnerExits(code):
                self._runner_code = code
        self.report(message)

    def _on_runner_forked(self, pid: int) -> None:
        self._runner = processes.find_process(pid) or Process(pid, 0)  # it has ended already
        self._runner_code, self._runner_gone = None, False
        if self._order is not None and self._shutdown is None and not self.ended:
            # Stopped while the runner was being forked: there was no process to signal yet.
            self._begin_shutdown([self._runner])

    def _on_ranks_forked(self, attempt: int, pids: list[int]) -> None:
        if attempt > self._attempt:
            self._end_attempt()
        self._attempt = attempt
        if self._meter is None:
            self._meter = start_meter(self._dir, self._device, self._env)
        self._pids = dict(zip(self.ranks, pids, strict=True))
        self._ranks = {rank: processes.find_process(pid) for rank, pid in self._pids.items()}
        if self._order is not None:
            # Stopped while the ranks were being forked: the running sequence does not know them.
            self._begin_shutdown(list(self._ranks.values()))

    def _end_attempt(self) -> None:
        """The ranks were started again: forget the attempt before."""
        self.drop_stacks()
        if self._order is not None and self._order.of_attempt:
            self._order, self._shutdown, self._grace = None, None, math.inf
        # Processes that the user's code has left behind would take part in the next attempt.
        runner = [] if self._runner is None else processes.descendants(self._runner.pid)
        for process in self._all_processes():
            if process != self._runner and process not in runner:
                processes.signal_and_continue(process, signal.SIGKILL)

    def lose_fork_server(self, code: int, output: str, why: ImportsFailed | None = None) -> None:
        """The fork server has ended: if the run has no runner yet, nothing more can start."""
        if not self.ended and self._runner is None:
            self.ended = True
            self.report(
                RunnerEnded(
                    None,
                    code or 1,
                    time.time(),
                    by_itself=False,
                    ranks_forked=bool(self._ranks),
                    fork_server=True,
                    output=output,
                    imports_failed=why,
                )
            )

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
        self._on_runner_end(-signal.SIGKILL if code is None else code)

    def _on_runner_end(self, code: int) -> None:
        assert self._runner is not None
        pid, self._runner = self._runner.pid, None
        by_itself = self._runner_code is not None
        if self._not_forkable is not None and code == 0 and by_itself and self._order is None:
            reason, self._not_forkable = self._not_forkable, None
            self.fork_runner(reason)
            return
        self.ended = True
        memory = self._oom.evidence(pid) if code == -signal.SIGKILL else ""
        forked = bool(self._ranks)
        self.report(
            RunnerEnded(
                pid, code, time.time(), by_itself=by_itself, ranks_forked=forked, memory=memory
            )
        )

    def step(self) -> None:
        self._look_after_runner()
        if self._stacks is not None and self._stacks.advance():
            self.drop_stacks()
            self.report(StacksCollected())
        if self.preemption.notice and not self._preempted:
            self._preempted = True
            self.report(Preempted(self.preemption.notice))
        if self._copying():  # a copy that is not known yet would be ended with the run
            return
        if self._shutdown is not None and self._shutdown.advance():
            self._shutdown = None
        if self.ended and self._shutdown is None:
            if left := self._all_processes():
                log.info("left behind: %s", [process.pid for process in left])
                # Children that the user's code has left behind: no grace period, nothing to save.
                self._shutdown = ShutdownSequence(
                    [], self._all_processes, grace=0.0, on_step=_unreported, clock=self._clock
                )
            else:
                self.over = True

    def close(self) -> None:
        self.preemption.close()
        if self._meter is not None:
            self._meter.close()
        if self._decisions is not None:
            self._decisions.close()
        processes.reap_adopted(self._spared())


def _unreported(step: str) -> None:
    """Ignore a step: steps against children left behind are not worth a line."""
