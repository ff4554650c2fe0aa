"""Runs a sweep's trials, one after the other or beside each other, and keeps how they stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpunb.runs import metrics, state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric
from tpunb.runs.metrics import MetricSeries
from tpunb.runs.result import RunResult
from tpunb.runs.spec import StopOrigin
from tpunb.sweeps.folder import (
    SweepDir,
    SweepSpec,
    Trial,
    TrialState,
    measure,
    read_steps,
    trial_key,
)
from tpunb.sweeps.planner import Planner, settled
from tpunb.sweeps.worker import Reply, Worker
from tpunb.utils import env_vars, files, memory, processes, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration

LOOK = 0.1
"""Seconds between two looks at everything."""
_MEASURE = 3.0
"""Seconds between two measurements of the trials' memory."""
_GROWN, _STEADY = 1.05, 20.0
"""A trial's memory that has not grown by this factor for so many seconds is what one takes."""
_GRACE = 15.0
"""Seconds that a notebook has to end, beside the grace period of its run."""
_LEFT = 40.0
"""Seconds that processes of a sweep that was killed have to end by themselves."""


@dataclass
class _Slot:
    """Where one trial runs at a time."""

    number: int
    worker: Worker | None = None
    trial: Trial | None = None
    began: float = 0.0
    """By the monotonic clock."""
    stopping: str = ""
    """Why it is being stopped: the trial's error; empty while it is not."""
    pruned: bool = False
    asked: float = 0.0
    """When it was asked to stop."""
    memory: int = 0
    """Bytes that the trial takes, as measured last …"""
    most: int = 0
    """… and the most so far, which it reached …"""
    grown: float = 0.0
    """… at this time."""
    tails: dict[str, _RunTail] = field(default_factory=dict)


class _RunTail:
    """The values of one metric of a run that goes on, in the order in which they were logged."""

    def __init__(self, run: RunDir, name: str, world_size: int) -> None:
        self._tail = files.Tail(run.metrics)
        self._lines = files.LineBuffer(files.LONGEST)
        self._series = MetricSeries(world_size, keep=False)
        self._name = name

    def read(self) -> list[tuple[int, float]]:
        """Steps that all ranks have logged since the last call, with their values."""
        points = []
        for line in self._lines.feed(self._tail.read()):
            row = metrics.parse_row(line.decode("utf-8", "replace"))
            if row is not None:
                event: Metric = metrics.to_event(row)
                points += self._series.add(event)
        points += self._series.settle(time.monotonic() - metrics.SETTLED)
        return [(point.step, point.value) for point in points if point.name == self._name]


class Scheduler:
    """One call's part of a sweep: from what is known on disk until every trial has ended.

    `known`: the notebook's defaults. `code`: the digest of its code and its own modules at the time
    of the call. `show` is called with all trials whenever something has changed, and every second.
    """

    def __init__(
        self,
        folder: SweepDir,
        spec: SweepSpec,
        planner: Planner,
        known: Mapping[str, Any],
        *,
        code: Callable[[], str],
        jobs: int = 1,
        timeout: float | None = None,
        retries: int = 0,
        show: Callable[[Mapping[int, Trial]], None],
    ) -> None:
        self.folder, self.spec, self.planner = folder, spec, planner
        self.trials = folder.read_trials()
        self._known, self._code = known, code
        self._timeout, self._retries = timeout, retries
        self._show = show
        self._slots = [_Slot(number) for number in range(jobs)]
        self._runs = folder.path.parent.parent
        self._again = bool(spec.again)
        self._peak = 0
        """The most memory that a trial took, in bytes."""
        self._measured = 0.0
        self._order: list[int] = []
        """Trials that wait and were begun before, or failed and have tries left."""
        self.stopped = False
        """Whether somebody has stopped the sweep."""

    # From the outside

    def prepare(self) -> None:
        """Take up what is there: trials that were cut off wait again, or turn out to have ended."""
        if any(trial.state is TrialState.RUNNING for trial in self.trials.values()):
            self._end_left()
        for trial in list(self.trials.values()):
            if trial.state is TrialState.RUNNING:
                when = self._ended_unseen(trial)
                cut_off = self._cut_off(trial)
                ended = cut_off if when is None else self._finished(trial, Reply(False), when=when)
                self._put(ended)
        for trial in self.trials.values():
            tries_left = trial.attempts <= self._retries
            if trial.state is TrialState.WAITING or (
                trial.state is TrialState.FAILED and tries_left
            ):
                self._order.append(trial.number)
        waiting = set(self._order)
        settled(self.planner, {n: t for n, t in self.trials.items() if n not in waiting})

    def runs_left(self) -> int:
        """How often a trial may still be started."""
        known = self.trials.values()
        tries = 1 + self._retries
        again = [t for t in known if not t.state.over or t.state is TrialState.FAILED]
        unknown = max(self.planner.total - len(known), 0)
        return unknown * tries + sum(max(tries - trial.attempts, 0) for trial in again)

    def run(self) -> Iterator[None]:
        """Run what is left; yields about ten times a second, for whoever wants to stop it."""
        shown = 0.0
        try:
            while True:
                changed = self._look()
                if not self.stopped:
                    changed |= self._begin()
                if changed or time.monotonic() - shown >= 1.0:
                    self._show(self.trials)
                    shown = time.monotonic()
                if not any(slot.trial for slot in self._slots) and (
                    self.stopped or not self._more()
                ):
                    break
                yield
                if not changed:
                    time.sleep(LOOK)
        finally:
            self._close()
            self._show(self.trials)

    def stop(self, *, now: bool = False) -> None:
        """Begin no trial any more, and stop those that run; `now`: without a grace period."""
        self.stopped = True
        for slot in self._slots:
            if slot.trial is not None:
                self._ask_to_stop(slot, "the sweep was stopped", now=now)

    # Trials, from their order to their end

    def _more(self) -> bool:
        if self._order:
            return True
        proposed = self.planner.propose(self.trials)
        if proposed is None:
            return False
        self._put(proposed)
        self._order.append(proposed.number)
        return True

    def _begin(self) -> bool:
        """Begin trials where there is room; True if there was any."""
        began = False
        for slot in self._slots:
            while slot.trial is None and self._has_room() and self._more():
                trial = self.trials[self._order.pop(0)]
                if (done := self._done_before(trial)) is not None:
                    self._put(done)
                    self.planner.tell(done)
                    began = True
                    self._show(self.trials)
                    continue
                self._start(slot, trial)
                began = True
        return began

    def _done_before(self, trial: Trial) -> Trial | None:
        if self._again or trial.attempts:
            return None
        return self.folder.find_done(self._key(trial, self._code()), trial, self.spec)

    def _key(self, trial: Trial, code: str) -> str:
        return trial_key(replace(self.spec, code=code), self._known, trial.parameters)

    def _start(self, slot: _Slot, trial: Trial) -> None:
        number = trial.number
        self.folder.clear(number)
        trial = replace(
            trial,
            state=TrialState.RUNNING,
            started=time.time(),
            ended=None,
            error="",
            runs=(),
            code=self._code(),
        )
        self._put(trial)
        if slot.worker is None or not slot.worker.alive:
            mark = f"{self.folder.path}#{slot.number}"
            slot.worker = Worker(mark, self._runs, self.folder.log)
        slot.trial, slot.began, slot.stopping, slot.pruned = trial, time.monotonic(), "", False
        slot.tails = {}
        slot.memory, slot.most, slot.grown = 0, 0, slot.began
        slot.worker.order(
            {
                "notebook": str(self.folder.notebook),
                "output": str(self.folder.executed(number)),
                "ran": str(self.folder.runs_file(number)),
                "parameters": trial.parameters,
                "cores": self.spec.cores or None,
                "on": self.spec.place or None,
                "trials": 0 if self.spec.place else self.runs_left(),
            }
        )

    def _look(self) -> bool:
        """Follow what runs; True if a trial has ended."""
        ended = False
        self._measure_memory()
        for slot in self._slots:
            if slot.trial is None or slot.worker is None:
                continue
            reply = slot.worker.poll()
            if reply is not None:
                if not slot.worker.alive:
                    slot.worker.close()
                    self._end_left(slot.worker.mark)
                    slot.worker = None
                self._end(slot, reply)
                ended = True
                continue
            self._follow(slot)
        return ended

    def _follow(self, slot: _Slot) -> None:
        """Its time-out, its pruner, and whether it has ended after it was asked to."""
        assert slot.trial is not None and slot.worker is not None
        now = time.monotonic()
        runs = self.folder.runs_of(slot.trial.number)
        if runs != slot.trial.runs:
            slot.trial = replace(slot.trial, runs=runs)
            self.trials[slot.trial.number] = slot.trial
        if slot.stopping:
            grace = max((_grace(RunDir(run)) for run in runs), default=0.0)
            if now - slot.asked > grace + _GRACE:
                slot.worker.kill()
            return
        if self._timeout is not None and now - slot.began > self._timeout:
            self._ask_to_stop(slot, f"stopped at the time-out of {duration(self._timeout)}")
            return
        if self.spec.metric is not None and runs:
            points = []
            for run in runs:
                points += self._tail(slot, run)
            if points and self.planner.report(slot.trial, points):
                slot.pruned = True
                self._ask_to_stop(slot, "pruned: others were better at the same step")

    def _tail(self, slot: _Slot, run: str) -> list[tuple[int, float]]:
        assert self.spec.metric is not None
        if run not in slot.tails:
            try:
                world_size = RunDir(run).read_spec().world_size
            except (OSError, ValueError):  # it is being written
                return []
            slot.tails[run] = _RunTail(RunDir(run), self.spec.metric, world_size)
        return slot.tails[run].read()

    def _ask_to_stop(self, slot: _Slot, reason: str, *, now: bool = False) -> None:
        """Stop the trial's runs as `tpunb stop` does; a notebook that has none is ended."""
        assert slot.trial is not None and slot.worker is not None
        again = bool(slot.stopping)
        slot.stopping = slot.stopping or reason
        slot.asked = slot.asked if again else time.monotonic()
        active = [
            run
            for run in map(RunDir, self.folder.runs_of(slot.trial.number))
            if state.run_state(run).active
        ]
        for run in active:
            with suppress(OSError):  # it was removed a moment ago
                state.request_stop(run, reason, origin=StopOrigin.COMMAND, now=now)
        if not active:
            slot.worker.kill()

    def _end(self, slot: _Slot, reply: Reply) -> None:
        assert slot.trial is not None
        trial, slot.trial = slot.trial, None
        number = trial.number
        self._peak = max(self._peak, slot.most)  # all that it has taken
        if slot.stopping and not reply.failed and not self._was_stopped(number):
            slot.stopping, slot.pruned = "", False  # it came to its end all the same
        if self.stopped and slot.stopping and not slot.pruned:
            self._put(self._cut_off(trial))
            return
        if slot.stopping and not slot.pruned:
            reply = Reply(True, slot.stopping)
        ended = self._finished(trial, reply, pruned=slot.pruned, stopped=bool(slot.stopping))
        self._put(ended)
        if ended.state is TrialState.FAILED and ended.attempts <= self._retries:
            self._order.insert(0, number)
            return
        self.planner.tell(ended)

    def _was_stopped(self, number: int) -> bool:
        results = [_wait(RunDir(run)) for run in self.folder.runs_of(number)]
        return any(result is None or result.stop is not None for result in results)

    def _finished(
        self,
        trial: Trial,
        reply: Reply,
        *,
        pruned: bool = False,
        stopped: bool = False,
        when: float | None = None,
    ) -> Trial:
        """The trial with how it ended, from its run folders and what papermill said.

        `when`: in seconds since the epoch; None: now.
        """
        runs = self.folder.runs_of(trial.number)
        results = [_wait(RunDir(run)) for run in runs]
        ended = replace(
            trial, runs=runs, ended=when or time.time(), attempts=trial.attempts + 1, error=""
        )
        if last := next((result for result in reversed(results) if result), None):
            cores, chips = last.spmd or last.world_size, max(map(_chips, runs))
            ended = replace(ended, device=last.device, cores=cores, chips=chips)
            ended = replace(ended, cost=_cost(results))
        ended = measure(ended, self.spec)
        if pruned:
            return replace(ended, state=TrialState.PRUNED)
        error = self._error(ended, reply, results, stopped=stopped)
        done = replace(ended, state=TrialState.FAILED if error else TrialState.COMPLETE)
        # A module that was edited meanwhile was imported before or after that.
        if not error and trial.code == self._code():
            self.folder.note_done(self._key(trial, trial.code), done)
        return replace(done, error=error)

    def _error(
        self, trial: Trial, reply: Reply, results: list[RunResult | None], *, stopped: bool
    ) -> str:
        """The first line of what went wrong; '' if nothing did."""
        if stopped:
            return reply.error
        for run, result in zip(trial.runs, results, strict=True):
            if result is None and state.run_state(RunDir(run)).active:
                return f"run {Path(run).name} goes on, although its notebook has ended"
            if result is None:
                return state.lost_message(RunDir(run)).partition("\n")[0]
            if result.failure is not None or result.stop is not None:
                return result.headline().partition("\n")[0]
        if reply.failed:
            return reply.error
        if not trial.runs:
            return "no cell ran %%tpu_train"
        if self.spec.metric is not None and trial.value is None:
            rows = [row for run in trial.runs for row in read_steps(run)]
            if any(self.spec.metric in row for row in rows):
                return f"every {self.spec.metric} that it logged is NaN"
            logged = ", ".join(trial.metrics) or "nothing"
            return f"it logged no {self.spec.metric} (it logged: {logged})"
        return ""

    def _cut_off(self, trial: Trial) -> Trial:
        """A trial that will run again: its time and its error are of no run."""
        runs = self.folder.runs_of(trial.number)
        return replace(
            trial, state=TrialState.WAITING, started=None, ended=None, error="", runs=runs
        )

    def _put(self, trial: Trial) -> None:
        self.folder.write_trial(trial)
        self.trials[trial.number] = trial

    # What a sweep that was killed has left

    def _end_left(self, mark: str = "") -> None:
        """Wait for processes that its trials have left: kernels end without what started them, and
        with them their runs. What stays is killed.
        """
        marks = [mark] if mark else [f"{env_vars.SWEEP}={self.folder.path}#{n}" for n in range(64)]
        until = time.monotonic() + _LEFT
        while left := processes.with_variables(marks):
            if time.monotonic() > until:
                for process in left:
                    processes.send_signal(process, 9)
            time.sleep(LOOK)

    def _ended_unseen(self, trial: Trial) -> float | None:
        """When a trial has ended whose end nobody wrote down; None if it was cut off.

        papermill writes into a notebook when all of it has run.
        """
        told = records.read_dict(self.folder.executed(trial.number)).get("metadata", {})
        papermill = told.get("papermill", {}) if isinstance(told, dict) else {}
        if not papermill.get("end_time") or papermill.get("exception"):
            return None
        results = [state.read_result(RunDir(run)) for run in self.folder.runs_of(trial.number)]
        ends = [result.ended for result in results if result is not None]
        return max(ends) if ends and len(ends) == len(results) else None

    # Memory

    def _has_room(self) -> bool:
        """Whether another trial may begin beside those that run: as much memory is free as one
        takes, and as those that run may still want.
        """
        running = [slot for slot in self._slots if slot.trial]
        if not running:
            return True
        if not self._peak:
            return False
        available = memory.available_memory()
        wanted = self._peak + sum(max(self._peak - slot.memory, 0) for slot in running)
        return available is None or available > wanted

    def _measure_memory(self) -> None:
        if len(self._slots) == 1 or time.monotonic() - self._measured < _MEASURE:
            return
        self._measured = time.monotonic()
        for slot in self._slots:
            if slot.trial is None or slot.worker is None:
                continue
            pids = [process.pid for process in processes.with_variables([slot.worker.mark])]
            taken = memory.added_memory(0, pids)
            if taken > _GROWN * slot.most:
                slot.grown = self._measured
            slot.memory, slot.most = taken, max(slot.most, taken)
            if self._peak or _at_work(slot) or self._is_steady(slot):
                self._peak = max(self._peak, slot.most)

    def _is_steady(self, slot: _Slot) -> bool:
        """Whether a trial that logs nothing takes no more memory, with a run that has begun."""
        assert slot.trial is not None
        return bool(slot.trial.runs) and self._measured - slot.grown > _STEADY

    def _close(self) -> None:
        for slot in self._slots:
            if slot.worker is None:
                continue
            if slot.trial is not None:  # something went wrong here
                slot.worker.kill()
                self._end_left(slot.worker.mark)
                with suppress(TpunbError):  # a full disk: the next call finds that it was cut off
                    self._put(self._cut_off(slot.trial))
            slot.worker.close()


def _at_work(slot: _Slot) -> bool:
    """Whether its ranks have begun to log, so that its memory says something."""
    assert slot.trial is not None
    return any(RunDir(run).metrics.exists() for run in slot.trial.runs)


def _grace(run: RunDir) -> float:
    try:
        return run.read_spec().grace
    except (OSError, ValueError):
        return 0.0


def _chips(run: str) -> int:
    try:
        return RunDir(run).read_spec().chips
    except (OSError, ValueError):
        return 0


def _wait(run: RunDir) -> RunResult | None:
    """The result of a run whose notebook has ended: those with --bg end with the kernel.

    None of one that is lost, or does not end in its grace period and some seconds.
    """
    state.wait_for_end(run, _grace(run) + _GRACE)
    return state.read_result(run)


def _cost(results: list[RunResult | None]) -> float | None:
    costs = [result.cost for result in results if result is not None and result.cost is not None]
    return sum(costs) if costs else None
