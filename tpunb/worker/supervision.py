"""One run as the guard sees it: from the order to the agent to the written result."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tpunb import rundir
from tpunb.events import Ended, Event, Note, Phase, RankEnded, RanksStarted, Stopping
from tpunb.models import Failure, RunResult
from tpunb.rundir import Outputs, RunDir
from tpunb.worker import outcome, processes, stacks
from tpunb.worker.again import Gathering
from tpunb.worker.ladder import Ladder
from tpunb.worker.memory import Memory
from tpunb.worker.notice import Notice
from tpunb.worker.outcome import Exit, Observed, Stop, Why
from tpunb.worker.processes import Process
from tpunb.worker.runlog import RunLog
from tpunb.worker.vigil import WAITED, Vigil


class Supervision:
    """Follows the processes of one run, stops them, and writes what came of it.

    `agent` is the process that waits for more runs, `order` sends a command to it. The guard
    calls `step` in its loop; it is True once the run has ended, its result is written and none
    of its processes is left.
    """

    def __init__(
        self, run: RunDir, agent: Process | None, order: Callable[[dict[str, Any]], None]
    ) -> None:
        self.dir = run
        # Held as long as this process lives: who reads the folder can tell a run that goes on
        # from one whose machine or guard has died.
        self._lock = open(run.lock, "w")  # noqa: SIM115
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._agent = agent
        self.spec = run.read_spec()
        self._order = order
        self._started = time.time()
        self._deadline = None if self.spec.timeout is None else time.monotonic() + self.spec.timeout
        self.problem = ""
        """Why the run folder does not hold everything; empty while it does."""
        self.unwritten: RunResult | None = None
        """The result, where it could not be written."""
        rundir.keep_room(run.result)
        rundir.keep_room(run.events, appended=True)
        rundir.keep_room(run.log, appended=True)
        self._outputs = Outputs(run, self.spec.world_size)
        self._log = RunLog(run)
        if self.spec.device == "CPU":
            self._log.say("rehearsal on CPU: no TPU takes part in this run")
        self._memory = Memory()
        self._notice = Notice()
        self._attempt = 0
        self._begun = False
        self._replicate = self.spec.replicate
        self._runner: Process | None = None
        self._ranks: dict[int, Process | None] = {}
        self._pids: dict[int, int] = {}
        self._exits: list[Exit] = []
        self._cell: int | None = None
        self._over = False
        """True once no process of this run will start or report anything any more."""
        self._stop: Stop | None = None
        self._ladder: Ladder | None = None
        self._hurries = False
        """No ladder gives time any more."""
        self._steps: set[str] = set()
        self._agent_said = ""
        self._vigil: Vigil | None = None
        self._again: Gathering | None = None
        self._hang: Failure | None = None

    def _emit(self, event: Event) -> None:
        """Tell of an event in the run folder. That it cannot be written ends nothing here."""
        try:
            self.dir.emit(event)
        except OSError as error:
            self.problem = self.problem or f"{self.dir.path}: {error.strerror}"

    def begin(self) -> None:
        """Have the agent start the run; nothing if it was stopped before."""
        if self._over:
            return
        self._begun = True
        self._order({"do": "run", "dir": str(self.dir.path), "replicate": self._replicate})

    def heard(self, message: dict[str, Any]) -> None:
        """Take in a message of the agent or the runner."""
        getattr(self, f"_on_{message.pop('kind')}")(**message)

    def _on_runner(self, pid: int) -> None:
        self._runner = processes.find(pid)
        if self._stop is not None and self._ladder is None and not self._over:
            # Stopped while it was being forked: there was nobody yet to be told.
            self._climb_from([self._runner])

    def _on_cell(self, number: int | None) -> None:
        self._cell = number

    def _on_ranks(self, attempt: int, pids: list[int]) -> None:
        if attempt > self._attempt:
            self._start_again(attempt)
        self._attempt = attempt
        self._pids = dict(enumerate(pids))
        self._ranks = {rank: processes.find(pid) for rank, pid in enumerate(pids)}
        prelude = self._replicate is not None
        self._vigil = Vigil(self.dir, attempt, len(pids), self.spec.hang_timeout, prelude=prelude)
        self._tell_recompiled(last=True)
        self._again = Gathering(self.dir, attempt, len(pids))
        self._emit(RanksStarted(attempt, tuple(pids)))
        if self._stop is not None:
            # Stopped while they were being forked: the ladder that runs does not know them.
            self._climb_from(list(self._ranks.values()))

    def _start_again(self, attempt: int) -> None:
        """The ranks were started again: what ended the attempt before is told, and over."""
        failed = self._result().failure
        headline = "a rank failed" if failed is None else failed.headline()
        self._emit(Note(f"{headline}: starting again (retry {attempt} of {self.spec.retries})"))
        self._exits.clear()
        if self._stop is not None and self._stop.why == "peer":
            self._stop, self._steps, self._ladder = None, set(), None
        # What the user's code has left behind would take part in the next attempt.
        runner = [] if self._runner is None else processes.descendants(self._runner.pid)
        for process in self._everyone():
            if process != self._runner and process not in runner:
                processes.end(process, signal.SIGKILL)

    def _on_rank_exit(self, rank: int, exitcode: int, at: float, peak: int) -> None:
        pid = self._pids.get(rank)
        killed = self._memory.killed(pid) if exitcode == -signal.SIGKILL and pid else ""
        self._exits.append(Exit(rank, pid, exitcode, at, peak, killed, frozenset(self._steps)))
        self._emit(RankEnded(self._attempt, rank, exitcode, at, peak))

    def _on_stop_ranks(self) -> None:
        """Torch elastic has seen a failed rank and wants the others ended."""
        first = next((end for end in self._exits if end.code != 0), None)
        reason = "a rank has failed" if first is None else f"rank {first.rank} has failed"
        if self._stop is None:
            self._stop = Stop("peer", reason, time.time())
        if self._ladder is None:
            self._climb_from(list(self._ranks.values()))

    def _on_spoiled(self, reason: str) -> None:
        self._replicate = reason

    def _on_runner_exit(self, code: int) -> None:
        self._runner = None
        spoiled = self._replicate is not None and self.spec.replicate is None and not self._ranks
        if spoiled and code == 0 and self._stop is None:
            self._emit(
                Note(f"{self._replicate}: every rank runs the cells above itself (replicate)")
            )
            self._cell = None
            self.begin()
            return
        # 1 is how it ends when a rank has failed, of which the rank itself has left word.
        follows = code == 1 and self._ranks and not self.dir.error(0, None).exists()
        if code != 0 and not follows and not any(end.code != 0 for end in self._exits):
            self._exits.append(Exit(None, None, code, time.time(), sent=frozenset(self._steps)))
        self._over = True

    def lost_agent(self, code: int, said: str) -> None:
        """The agent has ended, so nobody reports about runner and ranks any more."""
        if not self._over:
            self._agent_said = said
            sent = frozenset(self._steps)
            self._exits.append(Exit(None, None, code or 1, time.time(), sent=sent, agent=True))
        self._agent = None
        self._over = True

    def stop(self, why: Why, reason: str, *, now: bool = False) -> None:
        """End the run, with time to save; at once with `now`, or when asked again with it."""
        if self._stop is None or self._stop.why == "peer":
            self._stop = Stop(why, reason, time.time())
        with contextlib.suppress(OSError):  # then there is one more attempt, which is stopped too
            self.dir.stopping.touch()
        if not self._begun:
            self._over = True
        elif self._ladder is None and not self._over:
            living = [p for p in self._ranks.values() if p is not None and processes.alive(p)]
            if self._ranks or self._runner is not None:
                self._climb_from([*living] if self._ranks else [self._runner])
        if now:
            self._hurries = True
            if self._ladder is not None:
                self._ladder.hurry()

    def _climb_from(self, first: list[Process | None]) -> None:
        assert self._stop is not None
        known = [process for process in first if process is not None]
        self._ladder = Ladder(
            known,
            self._everyone,
            parent=self._runner,
            grace=0.0 if self._hurries else self.spec.grace,
            stepped=self._say_step,
        )

    def _say_step(self, step: str) -> None:
        """Once a run: a ladder that is begun anew for ranks just forked is not news."""
        if step not in self._steps:
            self._steps.add(step)
            self._emit(Stopping(step, self._stop.reason if self._stop else ""))

    def _everyone(self) -> list[Process]:
        """Every process of the run: all below the guard but the agent, which waits for more."""
        return [p for p in processes.descendants(os.getpid()) if p != self._agent]

    def step(self) -> bool:
        """Merge logs, look at the clock, climb the ladder. True when all is over."""
        written = self._outputs.read()
        self._log.add(written)
        if self._vigil is not None and self._stop is None and not self._over:
            if written:
                self._vigil.sign()
            if self._vigil.hangs():
                self._call_hung()
            elif apart := self._vigil.waiting():
                self._tell_who_waits(*apart)
        self._tell_recompiled()
        if self._notice.text and self._stop is None:
            self.stop("lost", f"this machine is about to be taken away: {self._notice.text}")
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            self.stop("timeout", f"--timeout {self.spec.timeout:g} s")
        if self._ladder is not None and self._ladder.climb():
            self._ladder = None
        if not self._over:
            return False
        if self._ladder is None and (left := self._everyone()):
            # Children that the user's code has left behind: no grace, nothing to save.
            self._ladder = Ladder([], self._everyone, grace=0.0, stepped=_unsaid)
            return not left
        if self._ladder is None:
            self._finish()
            return True
        return False

    def _tell_recompiled(self, *, last: bool = False) -> None:
        if self._again is not None:
            for line in self._again.read(last=last):
                self._emit(Note(line))
            if last:
                self._again.close()

    def _tell_who_waits(self, inside: list[int], outside: list[int]) -> None:
        """It may be meant (one rank evaluates), so the run goes on; on a TPU it could hang."""
        stacks.collect(self.dir, self._attempt, self._living(), native=False)
        where, _ = stacks.describe(self.dir, self.spec, self._attempt, self._ranks)
        those = [", ".join(map(str, ranks)) for ranks in (inside, outside)]
        self._emit(
            Note(
                f"waiting in a collective for {WAITED:g} s: {those[0]}; not there: {those[1]}\n"
                f"{where}"
            )
        )

    def _living(self) -> dict[int, Process]:
        return {r: p for r, p in self._ranks.items() if p is not None and processes.alive(p)}

    def _call_hung(self) -> None:
        """Say who waits where, while they still do, and stop them."""
        self._emit(Phase("no sign of life: reading the stacks of all ranks"))
        stacks.collect(self.dir, self._attempt, self._living())
        where, place = stacks.describe(self.dir, self.spec, self._attempt, self._ranks)
        silent = f"no rank has shown a sign of life for {self.spec.hang_timeout:g} s"
        self._hang = Failure(
            rank=None, pid=None, exitcode=None, signal=None, type="Hang",
            message=f"{silent} (a line, a metric, a step or a collective):\n{where}\n"
            "If nothing was wrong, give it more time with --hang-timeout.",
            cell=place.cell if place else None, line=place.line if place else None,
            traceback="", time=time.time(),
        )  # fmt: skip
        self.stop("hung", silent)

    def _finish(self) -> None:
        # What ranks wrote last is in the files by now: they are gone.
        while pieces := self._outputs.read():
            self._log.add(pieces)
        self._tell_recompiled(last=True)
        self._notice.close()
        self._outputs.close()
        self._log.close()
        if self._log.problem:
            self._emit(Note(f"run.log is not complete: {self._log.problem}"))
        result = self._result()
        try:
            self.dir.write_result(result)
        except OSError:
            self.unwritten = result
        for attempt in range(self._attempt + 1):
            for rank in (None, *range(self.spec.world_size)):
                rundir.give_up_room(self.dir.error(attempt, rank))
        self._lock.close()
        processes.reap_adopted(self._agent)
        self._emit(Phase(result.state))
        self._emit(Ended(result.state))

    def _result(self) -> RunResult:
        """How it ended, or how the present attempt did."""
        seen = Observed(
            started=self._started,
            ended=time.time(),
            exits=self._exits,
            stop=self._stop,
            attempt=self._attempt,
            replicate=self._replicate,
            cell=self._cell,
            hang=self._hang,
            stderr=self._agent_said,
        )
        return outcome.compose(self.dir, self.spec, seen)


def _unsaid(step: str) -> None:
    """Steps against children left behind are not worth a line."""
