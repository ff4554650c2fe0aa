"""Planners, which propose the next trial: from a list, or with Optuna."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tpunb.sweeps.folder import SweepDir, SweepSpec, Trial, TrialState, is_better
from tpunb.sweeps.space import Choice, Space
from tpunb.utils.errors import MissingPackageError

if TYPE_CHECKING:
    import optuna

REPORTED = 100
"""Points of a trial's metric that all go to the pruner; of the next ones, every second, and so on.
"""
_REASON = "tpunb:reason"
"""Attribute of a failed trial in the journal: why it failed."""


class Planner(Protocol):
    """Proposes trials, and receives their results."""

    total: int
    """Number of trials of the whole sweep."""

    def propose(self, known: Mapping[int, Trial]) -> Trial | None:
        """Return the next trial without a record; None if there is none."""

    def report(self, trial: Trial, points: Sequence[tuple[int, float]]) -> bool:
        """Report steps and values of a running trial; True if it should be pruned."""

    def tell(self, trial: Trial) -> None:
        """Record the end of a trial."""


class Listed:
    """A planner of trials that are known from the start: a grid, a list, or drawn by a seed."""

    def __init__(self, trials: Sequence[Mapping[str, Any]]) -> None:
        self._trials = trials
        self.total = len(trials)

    def propose(self, known: Mapping[int, Trial]) -> Trial | None:
        for number, parameters in enumerate(self._trials):
            if number not in known:
                return Trial(number, parameters)
        return None

    def report(self, trial: Trial, points: Sequence[tuple[int, float]]) -> bool:
        return False

    def tell(self, trial: Trial) -> None:
        """Do nothing: no later trial depends on this one."""


@dataclass
class _Attempt:
    """The values that one attempt at a trial has reported."""

    started: float | None
    seen: int = 0
    """Number of reported values, including those that were left out."""
    values: dict[int, float] = field(default_factory=dict)


class OptunaPlanner:
    """A planner with Optuna's ask and tell; Optuna's journal file is in the sweep's folder.

    Trials have the same numbers in both. Raises MissingPackageError without Optuna.
    """

    def __init__(self, folder: SweepDir, spec: SweepSpec, space: Space, total: int) -> None:
        try:
            import optuna
        except ModuleNotFoundError:
            install = "pip install 'tpunb[search]'"
            raise MissingPackageError("optuna", "--search", install) from None
        self.total = total
        self._optuna = optuna
        self._space = {name: _distribution(optuna, values) for name, values in space.items()}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._storage = open_journal(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Continued with the same seed, the sampler would propose the same trials again.
            begun = sum(1 for _ in folder.trials.glob("*.json"))
            seed = (int(spec.digest(), 16) + begun) % 2**32
            self.study = optuna.create_study(
                study_name=folder.id,
                storage=self._storage,
                sampler=optuna.samplers.TPESampler(seed=seed),
                direction="maximize" if is_better(spec)(1.0, 0.0) else "minimize",
                load_if_exists=True,
            )
        self._study_id = self._storage.get_study_id_from_name(folder.id)
        self._attempts: dict[int, _Attempt] = {}
        """The latest attempt at each trial, by number."""

    def propose(self, known: Mapping[int, Trial]) -> Trial | None:
        """Return a proposed trial that a crash left without a record; otherwise a new trial."""
        for asked in self.study.get_trials(deepcopy=False):
            if asked.number not in known and not asked.state.is_finished():
                if asked.params.keys() == self._space.keys():
                    return Trial(asked.number, asked.params)
                # Killed while Optuna wrote the parameters: the missing ones would be defaults.
                self.study.tell(asked.number, state=self._optuna.trial.TrialState.FAIL)
        if len(known) >= self.total:
            return None
        proposed = self.study.ask(self._space)
        return Trial(proposed.number, proposed.params)

    def report(self, trial: Trial, points: Sequence[tuple[int, float]]) -> bool:
        """Pass the values to the pruner; return True if the trial should be pruned.

        In long trials some values are left out, the same ones in all trials, because the pruner
        compares values at the same step.
        """
        frozen = self._frozen(trial.number)
        if frozen.state.is_finished():  # a failed trial that is run again
            return False
        attempt = self._attempts.get(trial.number)
        if attempt is None or attempt.started != trial.started:
            attempt = self._attempts[trial.number] = _Attempt(trial.started)
        new = False
        for step, value in points:
            attempt.seen += 1
            if step not in attempt.values and _is_reported(attempt.seen - 1):
                attempt.values[step] = value
                self._storage.set_trial_intermediate_value(self._id(trial.number), step, value)
                new = True
        if not new:
            return False
        # The journal also contains values of attempts that failed or were cut off.
        now = copy.copy(frozen)
        now.intermediate_values = attempt.values
        return self.study.pruner.prune(self.study, now)

    def tell(self, trial: Trial) -> None:
        """Write a trial's end into the journal, unless it is already there."""
        states = self._optuna.trial.TrialState
        if self._frozen(trial.number).state.is_finished():
            return
        if trial.error:
            self._note(trial.number, _REASON, trial.error[:500])
        if trial.runs:
            self._note(trial.number, "tpunb:run", trial.run)
        if trial.state is TrialState.COMPLETE:
            self.study.tell(trial.number, trial.value)
        elif trial.state is TrialState.PRUNED:
            self.study.tell(trial.number, state=states.PRUNED)
        else:
            self.study.tell(trial.number, state=states.FAIL)

    def _frozen(self, number: int) -> optuna.trial.FrozenTrial:
        return self.study.get_trials(deepcopy=False)[number]

    def _note(self, number: int, name: str, text: str) -> None:
        self._storage.set_trial_user_attr(self._id(number), name, text)

    def _id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)


def open_journal(folder: SweepDir) -> optuna.storages.JournalStorage:
    """Return the storage of a sweep's study; `optuna-dashboard journal.log` can open it too."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(folder.journal)))


def _is_reported(index: int) -> bool:
    """True for the first REPORTED indices, then for every second, every fourth, and so on."""
    stride = 1
    while index >= REPORTED * stride:
        stride *= 2
    return index % stride == 0


def _distribution(optuna: Any, values: Any) -> Any:
    kinds = optuna.distributions
    if isinstance(values, Choice):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns about lists as values, but they work
            return kinds.CategoricalDistribution(values.values)
    kind = kinds.IntDistribution if values.whole else kinds.FloatDistribution
    return kind(values.low, values.high, log=values.log)
