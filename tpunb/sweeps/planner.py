"""Which trial is next: from a list, or as Optuna proposes."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tpunb.sweeps.folder import SweepDir, SweepSpec, Trial, TrialState, is_better
from tpunb.sweeps.space import Choice, Space
from tpunb.utils.errors import MissingPackageError

if TYPE_CHECKING:
    import optuna

REPORTED = 100
"""Points of a metric that a pruner gets of a trial before it gets every second only."""
_SKIPPED = "tpunb:reason"
"""Of a trial in the journal: why it failed."""


class Planner(Protocol):
    """Proposes trials and hears how they ended."""

    total: int
    """Trials of the whole sweep."""

    def propose(self, known: Mapping[int, Trial]) -> Trial | None:
        """The next trial that is in no record yet; None if there is none now, or none any more."""

    def report(self, trial: Trial, points: Sequence[tuple[int, float]]) -> bool:
        """Take steps and values of a trial that goes on; True if it may be stopped early."""

    def tell(self, trial: Trial) -> None:
        """Hear how a trial has ended."""


class Listed:
    """Trials that are known from the beginning: a grid, a list, or numbers drawn by a seed."""

    def __init__(self, trials: Sequence[Mapping[str, Any]]) -> None:
        self._trials = trials
        self.total = len(trials)

    def propose(self, known: Mapping[int, Trial]) -> Trial | None:
        """The first of which nothing is known."""
        for number, parameters in enumerate(self._trials):
            if number not in known:
                return Trial(number, parameters)
        return None

    def report(self, trial: Trial, points: Sequence[tuple[int, float]]) -> bool:
        """Nothing is stopped early."""
        return False

    def tell(self, trial: Trial) -> None:
        """Nothing depends on it."""


@dataclass
class _Attempt:
    """What is known of one attempt at a trial."""

    started: float | None
    seen: int = 0
    """Values that came, also those that were left out."""
    values: dict[int, float] = field(default_factory=dict)


class Search:
    """Optuna's ask and tell; its journal file is in the sweep's folder.

    A trial has the same number in both. Raises MissingPackageError without Optuna.
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
            # A sampler that goes on with the same seed would propose what it did before.
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
        """What was reported of the latest attempt at a trial, by number."""

    def propose(self, known: Mapping[int, Trial]) -> Trial | None:
        """One that was asked for and never begun, as a crash leaves it; else a new one."""
        for asked in self.study.get_trials(deepcopy=False):
            if asked.number not in known and not asked.state.is_finished():
                if asked.params.keys() == self._space.keys():
                    return Trial(asked.number, asked.params)
                # Killed while Optuna wrote them: without the rest it would run with defaults.
                self.study.tell(asked.number, state=self._optuna.trial.TrialState.FAIL)
        if len(known) >= self.total:
            return None
        proposed = self.study.ask(self._space)
        return Trial(proposed.number, proposed.params)

    def report(self, trial: Trial, points: Sequence[tuple[int, float]]) -> bool:
        """Give the values to the pruner. Of long trials every second, fourth … value is left out,
        the same in all trials: it compares what they had at the same step.
        """
        frozen = self._frozen(trial.number)
        if frozen.state.is_finished():  # it failed, was told, and is run again
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
        # The journal also has what an attempt that failed, or was cut off, has reached.
        now = copy.copy(frozen)
        now.intermediate_values = attempt.values
        return self.study.pruner.prune(self.study, now)

    def tell(self, trial: Trial) -> None:
        """Write the end into the journal, if it does not stand there already."""
        states = self._optuna.trial.TrialState
        if self._frozen(trial.number).state.is_finished():
            return
        if trial.error:
            self._note(trial.number, _SKIPPED, trial.error[:500])
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
    """The storage of a sweep's study, which `optuna-dashboard journal.log` opens too."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(folder.journal)))


def _is_reported(index: int) -> bool:
    """All of the first REPORTED; then every second, every fourth, and so on."""
    stride = 1
    while index >= REPORTED * stride:
        stride *= 2
    return index % stride == 0


def _distribution(optuna: Any, values: Any) -> Any:
    kinds = optuna.distributions
    if isinstance(values, Choice):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # lists as values work, and Optuna would rather not
            return kinds.CategoricalDistribution(values.values)
    kind = kinds.IntDistribution if values.whole else kinds.FloatDistribution
    return kind(values.low, values.high, log=values.log)


def settled(planner: Planner, known: Mapping[int, Trial]) -> None:
    """Tell what had ended before a crash could tell it."""
    for trial in known.values():
        if trial.state.over:
            planner.tell(trial)


def take(trials: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first `count` trials, or all there are."""
    return list(itertools.islice(trials, count))
