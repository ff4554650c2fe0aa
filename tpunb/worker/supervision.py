"""One run as the guard sees it: from the order to the agent to the written result."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from typing import Any

from tpunb.events import Ended, Note, Phase, RankEnded, RanksStarted, Stopping
from tpunb.rundir import Outputs, RunDir
from tpunb.worker import outcome, processes
from tpunb.worker.ladder import Ladder
from tpunb.worker.outcome import Exit, Observed, Stop, Why
from tpunb.worker.processes import Process
from tpunb.worker.runlog import RunLog


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
        self._outputs = Outputs(run, self.spec.world_size)
        self._log = RunLog(run)
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
        self._steps: set[str] = set()
        self._agent_said = ""

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

    def _on_cell(self, number: int | None) -> None:
        self._cell = number

    def _on_ranks(self, attempt: int, pids: list[int]) -> None:
        self._attempt = attempt
        self._pids = dict(enumerate(pids))
        self._ranks = {rank: processes.find(pid) for rank, pid in enumerate(pids)}
        self.dir.emit(RanksStarted(attempt, tuple(pids)))
        if self._stop is not None:
            # Stopped while they were being forked: the ladder that runs does not know them.
            self._climb_from(list(self._ranks.values()))

    def _on_rank_exit(self, rank: int, exitcode: int, at: float) -> None:
        self._exits.append(Exit(rank, self._pids.get(rank), exitcode, at))
        self.dir.emit(RankEnded(self._attempt, rank, exitcode, at))

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
            self.dir.emit(
                Note(f"{self._replicate}: every rank runs the cells above itself (replicate)")
            )
            self._cell = None
            self.begin()
            return
        if code != 0 and not any(end.code != 0 for end in self._exits):
            self._exits.append(Exit(None, None, code, time.time()))
        self._over = True

    def lost_agent(self, code: int, said: str) -> None:
        """The agent has ended, so nobody reports about runner and ranks any more."""
        if not self._over:
            self._agent_said = said
            self._exits.append(Exit(None, None, code or 1, time.time()))
        self._agent = None
        self._over = True

    def stop(self, why: Why, reason: str, *, now: bool = False) -> None:
        """End the run, with time to save; at once with `now`, or when asked again with it."""
        self._stop = self._stop or Stop(why, reason, time.time())
        if not self._begun:
            self._over = True
        elif self._ladder is None and not self._over:
            living = [p for p in self._ranks.values() if p is not None and processes.alive(p)]
            self._climb_from([*living] if self._ranks else [self._runner])
        if now and self._ladder is not None:
            self._ladder.hurry()

    def _climb_from(self, first: list[Process | None]) -> None:
        assert self._stop is not None
        known = [process for process in first if process is not None]
        self._ladder = Ladder(
            known,
            self._everyone,
            parent=self._runner,
            grace=self.spec.grace,
            stepped=self._say_step,
        )

    def _say_step(self, step: str) -> None:
        """Once a run: a ladder that is begun anew for ranks just forked is not news."""
        if step not in self._steps:
            self._steps.add(step)
            self.dir.emit(Stopping(step, self._stop.reason if self._stop else ""))

    def _everyone(self) -> list[Process]:
        """Every process of the run: all below the guard but the agent, which waits for more."""
        return [p for p in processes.descendants(os.getpid()) if p != self._agent]

    def step(self) -> bool:
        """Merge logs, look at the clock, climb the ladder. True when all is over."""
        self._log.add(self._outputs.read())
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

    def _finish(self) -> None:
        # What ranks wrote last is in the files by now: they are gone.
        while pieces := self._outputs.read():
            self._log.add(pieces)
        self._outputs.close()
        self._log.close()
        seen = Observed(
            started=self._started,
            ended=time.time(),
            exits=self._exits,
            stop=self._stop,
            attempt=self._attempt,
            replicate=self._replicate,
            cell=self._cell,
            stderr=self._agent_said,
        )
        result = outcome.compose(self.dir, self.spec, seen)
        self.dir.write_result(result)
        self._lock.close()
        self.dir.emit(Phase(result.state))
        self.dir.emit(Ended(result.state))


def _unsaid(step: str) -> None:
    """Steps against children left behind are not worth a line."""
