"""The figure of a sweep: metric over the trials, parallel coordinates, parameter importance.

Import this module when a figure is drawn: it raises MissingPackageError without matplotlib.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpunb.runs.figures import Picture
from tpunb.sweeps.folder import Trial, TrialState
from tpunb.sweeps.table import SweepTable

_PANEL = 4.2, 3.0
"""Size of the first and last panel in inches; the middle one grows with the parameters."""
_AXIS = 1.3
"""Width of each parameter's axis in inches."""
_LEAST = 4
"""Minimum number of trials for a meaningful importance of parameters."""


def draw(table: SweepTable) -> Picture:
    """Draw the metric over the trials, parallel coordinates, and, if known, the importance.

    Raises ValueError if no trial is complete.
    """
    trials = [trial for trial in table.sorted() if table.value(trial) is not None]
    trials = [trial for trial in trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    if not any(trial.state is TrialState.COMPLETE for trial in trials):
        raise ValueError("no trial is complete: there is nothing to draw")
    names = table.parameters
    important = _importance(table, names)
    widths = [_PANEL[0], _AXIS * (len(names) + 1), *([_PANEL[0]] if important else [])]
    figure = Picture(figsize=(sum(widths), _PANEL[1]), layout="constrained", dpi=120)
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    _over_trials(axes[0], table, trials)
    _parallel(axes[1], table, trials, names)
    if important:
        _bars(axes[2], important)
    return figure


def _over_trials(axis: Any, table: SweepTable, trials: Sequence[Trial]) -> None:
    listed = sorted(trials, key=lambda trial: trial.number)
    complete = [trial for trial in listed if trial.state is TrialState.COMPLETE]
    pruned = [trial for trial in listed if trial.state is TrialState.PRUNED]
    axis.scatter([t.number for t in complete], [table.value(t) for t in complete], s=16)
    if pruned:
        axis.scatter(
            [t.number for t in pruned],
            [table.value(t) for t in pruned],
            s=16,
            marker="x",
            color="grey",
            label="pruned",
        )
    better = table.better()
    best: list[float] = []
    for trial in complete:
        value = table.value(trial)
        assert value is not None
        best.append(value if not best or better(value, best[-1]) else best[-1])
    axis.step(
        [t.number for t in complete], best, where="post", linewidth=1.0, color="C1", label="best"
    )
    axis.set_xlabel("trial")
    axis.set_ylabel(table.metric)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize="small")


def _parallel(axis: Any, table: SweepTable, trials: Sequence[Trial], names: Sequence[str]) -> None:
    """Draw a vertical axis for each parameter and for the metric, and a line for each trial."""
    import matplotlib

    columns = [[trial.parameters.get(name) for trial in trials] for name in names]
    values = [table.value(trial) for trial in trials]
    scaled = [_scaled(column) for column in [*columns, values]]
    heights = scaled[-1][0]
    colours = matplotlib.colormaps["viridis"]
    best = table.best
    for index, trial in reversed(list(enumerate(trials))):
        line = [column[index] for column, _ in scaled]
        marked = best is not None and trial.number == best.number
        axis.plot(
            range(len(line)),
            line,
            color="C1" if marked else colours(heights[index]),
            linewidth=2.2 if marked else 0.9,
            alpha=1.0 if marked else 0.75,
            zorder=3 if marked else 2,
        )
    for place, (_, ticks) in enumerate(scaled):
        axis.axvline(place, color="grey", linewidth=0.7, zorder=1)
        for height, text in ticks:
            axis.annotate(
                text,
                (place, height),
                xytext=(3, 0),
                textcoords="offset points",
                fontsize=6.5,
                va="center",
                zorder=4,
            )
    axis.set_xticks(range(len(scaled)), [*names, table.metric], fontsize=8)
    axis.set_yticks([])
    axis.set_xlim(-0.1, len(scaled) - 0.6)
    axis.spines[:].set_visible(False)


def _scaled(column: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the values' heights from 0 to 1, and the labels of the axis with their heights."""
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in column)
    distinct = list(dict.fromkeys(map(repr, sorted(column) if numbers else column)))
    if not numbers:
        places = {text: i / max(len(distinct) - 1, 1) for i, text in enumerate(distinct)}
        return (
            [places[repr(value)] for value in column],
            [(height, text.strip("'\"")[:14]) for text, height in places.items()],
        )
    low, high = min(column), max(column)
    log = low > 0 and high / low >= 100

    def height(value: Any) -> float:
        if high == low:
            return 0.5
        if log:
            return math.log(value / low) / math.log(high / low)
        return float((value - low) / (high - low))

    written = sorted(set(column)) if len(distinct) <= 6 else [low, high]
    return [height(v) for v in column], [(height(v), f"{v:.3g}") for v in written]


def _importance(table: SweepTable, names: Sequence[str]) -> Mapping[str, float]:
    """Return the share of the metric's variance that each parameter explains; {} if unknown."""
    if len(names) < 2:
        return {}
    try:
        import optuna
    except ModuleNotFoundError:
        return {}
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    trials = [
        trial
        for trial in table.trials.values()
        if trial.state is TrialState.COMPLETE and table.value(trial) is not None
    ]
    if len(trials) < _LEAST or len({table.value(trial) for trial in trials}) < 2:
        return {}
    spaces: dict[str, Any] = {}
    for name in names:
        column = [trial.parameters.get(name) for trial in trials]
        if len(set(map(repr, column))) < 2:
            continue
        if all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in column):
            numbers = [float(value) for value in column if value is not None]
            log = min(numbers) > 0 and max(numbers) / min(numbers) >= 100
            spaces[name] = FloatDistribution(min(numbers), max(numbers), log=log)
        else:
            spaces[name] = CategoricalDistribution(tuple(dict.fromkeys(map(repr, column))))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize" if table.better()(1.0, 0.0) else "minimize")
    for trial in trials:
        given = {
            name: float(trial.parameters[name])
            if isinstance(space, FloatDistribution)
            else repr(trial.parameters.get(name))
            for name, space in spaces.items()
        }
        study.add_trial(
            optuna.trial.create_trial(params=given, distributions=spaces, value=table.value(trial))
        )
    evaluator: Any
    if importlib.util.find_spec("sklearn") is None:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    else:
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator)


def _bars(axis: Any, important: Mapping[str, float]) -> None:
    names = sorted(important, key=lambda name: important[name])
    axis.barh(names, [important[name] for name in names], color="C0")
    axis.set_xlabel("importance (share of the explained variance)")
    axis.spines[["top", "right"]].set_visible(False)
