"""What a chart draws: for each metric and step one value, as `run.metrics(reduced=True)` has it."""

from __future__ import annotations

from collections.abc import Sequence

from tpunb import records
from tpunb.events import Metric


class Points:
    """Built up from what ranks log. A step that all have logged is kept as one number."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._whole: dict[str, dict[int, float]] = {}
        """Reduced, by name and step."""
        self._waiting: dict[str, dict[int, dict[int, float]]] = {}
        """Steps that only some ranks have logged: by name, step and rank."""
        self._how: dict[str, str] = {}
        self._attempt = 0

    def add(self, metric: Metric) -> None:
        """Take what a rank has logged; without a step there is nowhere to draw it."""
        if metric.step is None or metric.attempt < self._attempt:
            return
        if metric.attempt > self._attempt:
            self._attempt = metric.attempt
            self._forget(metric.step)
        self._how.update(metric.reduce)
        for name, value in metric.values.items():
            whole = self._whole.setdefault(name, {})
            waiting = self._waiting.setdefault(name, {})
            by_rank = waiting.setdefault(metric.step, {})
            by_rank[metric.rank] = value
            if len(by_rank) == self._ranks:
                whole[metric.step] = self._reduced(name, waiting.pop(metric.step))

    def _forget(self, step: int) -> None:
        """Another attempt begins with this step: what those before made of it does not count."""
        for whole in self._whole.values():
            for late in [one for one in whole if one >= step]:
                del whole[late]
        for waiting in self._waiting.values():
            for late in [one for one in waiting if one >= step]:
                del waiting[late]

    def _reduced(self, name: str, by_rank: dict[int, float]) -> float:
        return records.reduced(self._how.get(name, records.MEAN), by_rank.values())

    @property
    def names(self) -> Sequence[str]:
        """The metrics, in the order in which they came."""
        return tuple(self._whole)

    def of(self, name: str) -> list[tuple[float, float]]:
        """Step and value, in the order of steps."""
        some = {step: self._reduced(name, found) for step, found in self._waiting[name].items()}
        return sorted((self._whole[name] | some).items())
