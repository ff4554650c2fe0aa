"""Runs a sweep's trials, one or several at a time, and records their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpunb.runs import metrics, ownership, state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric
from tpunb.runs.metrics import MetricSeries
from tpunb.runs.result import RunResult
from tpunb.runs.spec import Stop, StopOrigin
from tpunb.sweeps.folder import (
    SweepDir,
    SweepSpec,
    Trial,
    TrialState,
    measure,
    read_steps,
    trial_key,
)
from tpunb.sweeps.planner import Planner
from tpunb.sweeps.space import MOST
from tpunb.sweeps.worker import Reply, Worker
from tpunb.utils import env_vars, files, memory, processes, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration

POLL = 0.1
"""Seconds between polls of the workers."""
_MEASURE = 3.0
"""Seconds between measurements of the trials' memory."""
_GROWN, _STEADY = 1.05, 20.0
"""A trial's memory is steady if it has not grown by this factor for this many seconds."""
_GRACE = 15.0
"""Seconds that a notebook has to end, in addition to the grace period of its run."""
_LEFT = 40.0
"""Seconds that left-over processes of a killed sweep have to end by themselves."""


@dataclass
class _Slot:
    number: int
    worker: Worker | None = None
    trial: Trial | None = None
    began: float = 0.0
    """Start of the trial, by the monotonic clock."""
    stopping: str = ""
    """The reason for a stop, which becomes the trial's error; '' if it is not being stopped."""
    pruned: bool = False
    asked: float = 0.0
    """Time of the request to stop."""
    memory: int = 0
    """Bytes that the trial used at the last measurement."""
    most: int = 0
    """Maximum of `memory` so far."""
    grown: float = 0.0
    """Time at which `most` last grew by more than _GROWN."""
    tails: dict[str, _RunTail] = field(default_factory=dict)


class _RunTail:
    """Reads the values of one metric of an active run, in the order in which they were logged."""

    def __init__(self, run: RunDir, name: str, world_size: int) -> None:
        self._tail = files.Tail(run.metrics)
        self._lines = files.LineBuffer(files.LONGEST)
        self._series = MetricSeries(world_size, keep=False)
        self._name = name

    def read(self) -> list[tuple[int, float]]:
        """Return steps that all ranks have logged since the last call, with their values."""
        points = []
        for line in self._lines.feed(self._tail.read()):
            row = metrics.parse_row(line.decode("utf-8", "replace"))
            if row is not None:
                event: Metric = metrics.to_event(row)
                points += self._series.add(event)
        points += self._series.settle(time.monotonic() - metrics.SETTLED)
        return [(point.step, point.value) for point in points if point.name == self._name]


class Scheduler:
    """Continues a sweep from its state on disk until every trial has ended.

    `known`: the notebook's defaults. `code`: returns the digest of its code and the user's modules
    at the time of the call. `show` is called with all trials after each change, and every second.
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
        """Maximum bytes of memory that a trial has used."""
        self._measured = 0.0
        self._order: list[int] = []
        """Trials to run next: begun before and waiting, or failed with attempts left."""
        self.stopped = False
        """True once `stop` was called."""

    # Public methods

    def prepare(self) -> None:
        """Read the trials' states: those that were cut off have ended or must run again."""
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
        for trial in self.trials.values():
            if trial.state.over and trial.number not in waiting:
                self.planner.tell(trial)  # again, in case a crash came before that

    def runs_left(self) -> int:
        """Return the maximum number of trials, including retries, that are still to be started."""
        known = self.trials.values()
        tries = 1 + self._retries
        again = [t for t in known if not t.state.over or t.state is TrialState.FAILED]
        unknown = max(self.planner.total - len(known), 0)
        return unknown * tries + sum(max(tries - trial.attempts, 0) for trial in again)

    def run(self) -> Iterator[None]:
        """Run the remaining trials; yield about ten times a second, so that the caller can stop."""
        shown = 0.0
        try:
            while True:
                changed = self._poll()
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
                    time.sleep(POLL)
        finally:
            self._close()
            self._show(self.trials)

    def stop(self, *, now: bool = False) -> None:
        """Start no more trials, and stop the running ones; `now`: without a grace period."""
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
        """Start trials while there is room; True if any was started or found complete."""
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
        ownership.require_own(self.folder.path)
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

    def _poll(self) -> bool:
        """Follow the running trials; True if one has ended."""
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
        """Check a running trial's time-out and pruner; kill it if it does not stop in time."""
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
            except (OSError, ValueError):  # the spec is still being written
                return []
            slot.tails[run] = _RunTail(RunDir(run), self.spec.metric, world_size)
        return slot.tails[run].read()

    def _ask_to_stop(self, slot: _Slot, reason: str, *, now: bool = False) -> None:
        """Stop the trial's runs as `tpunb stop` does; kill a notebook that has no active run."""
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
            with suppress(OSError):  # the run was just removed
                state.request_stop(run, Stop(reason=reason, origin=StopOrigin.COMMAND, now=now))
        if not active:
            slot.worker.kill()

    def _end(self, slot: _Slot, reply: Reply) -> None:
        assert slot.trial is not None
        trial, slot.trial = slot.trial, None
        number = trial.number
        self._peak = max(self._peak, slot.most)  # the maximum of a whole trial
        if slot.stopping and not reply.failed and not self._was_stopped(number):
            slot.stopping, slot.pruned = "", False  # it ended normally before the stop
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
        """Return the ended trial, with data from its run folders and papermill's reply.

        `when`: end of the trial in seconds since the epoch; None: now.
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
        # If a module was edited during the trial, it is unknown which version was imported.
        if not error and trial.code == self._code():
            self.folder.note_done(self._key(trial, trial.code), done)
        return replace(done, error=error)

    def _error(
        self, trial: Trial, reply: Reply, results: list[RunResult | None], *, stopped: bool
    ) -> str:
        """Return the first line of the trial's error; '' if there was none."""
        if stopped:
            return reply.error
        for run, result in zip(trial.runs, results, strict=True):
            if result is None and state.run_state(RunDir(run)).active:
                return f"run {Path(run).name} is still running, although its notebook has ended"
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
                return f"all logged values of {self.spec.metric} are NaN"
            logged = ", ".join(trial.metrics) or "nothing"
            return f"no {self.spec.metric} was logged (logged: {logged})"
        return ""

    def _cut_off(self, trial: Trial) -> Trial:
        """Return the trial as waiting to run again, without times and error."""
        runs = self.folder.runs_of(trial.number)
        return replace(
            trial, state=TrialState.WAITING, started=None, ended=None, error="", runs=runs
        )

    def _put(self, trial: Trial) -> None:
        self.folder.write_trial(trial)
        self.trials[trial.number] = trial

    # Left-overs of a sweep that was killed

    def _end_left(self, mark: str = "") -> None:
        """Wait until left-over processes of trials have ended, and kill those that have not.

        Kernels notice that the process that started them is gone and end, and with them their runs.
        """
        # The killed sweep may have had more jobs than this one, at most one for each trial.
        slots = range(max(MOST, len(self.trials)))
        marks = [mark] if mark else [f"{env_vars.SWEEP}={self.folder.path}#{n}" for n in slots]
        until = time.monotonic() + _LEFT
        while left := processes.with_variables(marks):
            if time.monotonic() > until:
                for process in left:
                    processes.send_signal(process, 9)
            time.sleep(POLL)

    def _ended_unseen(self, trial: Trial) -> float | None:
        """Return when a trial ended whose end was not recorded; None if it was cut off.

        papermill's metadata in the notebook show whether all cells have run.
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
        """True if there is memory for another trial and for the growth of the running trials."""
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
        """True if a trial has a run and its memory no longer grows, even if it logs nothing."""
        assert slot.trial is not None
        return bool(slot.trial.runs) and self._measured - slot.grown > _STEADY

    def _close(self) -> None:
        for slot in self._slots:
            if slot.worker is None:
                continue
            if slot.trial is not None:  # an exception has ended this method's caller
                slot.worker.kill()
                self._end_left(slot.worker.mark)
                with suppress(TpunbError):  # disk full: the next call finds that it was cut off
                    self._put(self._cut_off(slot.trial))
            slot.worker.close()


def _at_work(slot: _Slot) -> bool:
    """True if a trial's ranks have begun to log, so that its memory is representative."""
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
    """Wait for the result of a run whose notebook has ended: runs with --bg end with the kernel.

    None if the run is lost, or does not end within its grace period and _GRACE.
    """
    state.wait_for_end(run, _grace(run) + _GRACE)
    return state.read_result(run)


def _cost(results: list[RunResult | None]) -> float | None:
    costs = [result.cost for result in results if result is not None and result.cost is not None]
    return sum(costs) if costs else None
