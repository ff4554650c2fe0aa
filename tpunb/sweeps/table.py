"""The table of a sweep's trials, as text and HTML: best first, with a limited number of rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from tpunb.display.html import GREY, framed
from tpunb.runs import metrics
from tpunb.sweeps.folder import SweepKind, SweepSpec, Trial, TrialState, is_better
from tpunb.utils.terminal import Style, join, paint
from tpunb.utils.text import duration, excerpt

BEST = "★"
ROWS = 100
"""Maximum rows in a notebook or at the end of a command; `Study.table()` has all."""
_LONGEST_VALUE = 28
_LONGEST_ERROR = 80
_SHORTEST_ERROR = 24
_LEAST = ("where", "step", "chip hours", "run", "cost", "time")
"""Columns that are left out in a narrow terminal, in this order."""
_STYLES = {
    TrialState.WAITING: Style.FAINT,
    TrialState.RUNNING: Style.ACTIVE,
    TrialState.COMPLETE: Style.GOOD,
    TrialState.FAILED: Style.BAD,
    TrialState.PRUNED: Style.ODD,
}
_COLOURS = {
    TrialState.RUNNING: "#2f81f7",
    TrialState.COMPLETE: "#2da44e",
    TrialState.FAILED: "#e5534b",
    TrialState.PRUNED: "#bf8700",
}
_RANKS = {
    TrialState.COMPLETE: 0,
    TrialState.PRUNED: 0,
    TrialState.RUNNING: 1,
    TrialState.FAILED: 2,
    TrialState.WAITING: 3,
}


@dataclass(frozen=True)
class SweepTable:
    """A snapshot of a sweep's trials, and its table."""

    spec: SweepSpec
    trials: Mapping[int, Trial]
    total: int
    """Number of trials of the whole sweep, including those without a record."""

    @cached_property
    def metric(self) -> str | None:
        """The sweep's metric, or the first one whose name shows which values are better."""
        if self.spec.metric is not None:
            return self.spec.metric
        for trial in self.trials.values():
            for name in trial.metrics:
                if metrics.comparison(name) is not None:
                    return name
        return None

    def value(self, trial: Trial) -> float | None:
        """Return the metric's best value in a trial."""
        if self.spec.metric is not None:
            return trial.value
        return None if self.metric is None else trial.metrics.get(self.metric)

    @property
    def best(self) -> Trial | None:
        """The complete trial with the best value, the first one of equals."""
        better, best = self.better(), None
        for trial in sorted(self.trials.values(), key=lambda trial: trial.number):
            value = self.value(trial)
            if trial.state is not TrialState.COMPLETE or value is None:
                continue
            if best is None or better(value, self.value(best)):
                best = trial
        return best

    def better(self) -> Any:
        """Return a function that is True for (a, b) if a is the better value of the metric."""
        if self.spec.metric is not None:
            return is_better(self.spec)
        name = self.metric
        return float.__lt__ if name is None else metrics.comparison(name)

    def sorted(self) -> list[Trial]:
        """Return the trials, best first, then those without a value: running, failed, waiting."""
        more = self.better()(1.0, 0.0)

        def key(trial: Trial) -> tuple[Any, ...]:
            value = self.value(trial)
            known = value is not None and trial.state is not TrialState.FAILED
            first = 0 if known else max(_RANKS[trial.state], 1)
            return (first, (-value if more else value) if known and value else 0.0, trial.number)

        return sorted(self.trials.values(), key=key)

    @cached_property
    def parameters(self) -> list[str]:
        """The parameters that differ between trials, including future ones; all if none differs."""
        known = [trial.parameters for trial in self.trials.values()]
        planned = self.spec.space.get("trials", []) if self.spec.kind is SweepKind.LIST else []
        names = list(dict.fromkeys(name for given in known for name in given))
        differ = [
            name
            for name in names
            if len({repr(given.get(name)) for given in (*known, *planned)}) > 1
            or (self.spec.kind is not SweepKind.LIST and _has_several(self.spec.space.get(name)))
        ]
        return differ or names

    def headline(self) -> str:
        """Return '12 trials: 9 complete, 1 failed, 2 waiting · best accuracy 0.97 in trial 4'."""
        counts: dict[str, int] = {}
        for trial in self.trials.values():
            counts[trial.state] = counts.get(trial.state, 0) + 1
        waiting = counts.pop(TrialState.WAITING, 0) + max(self.total - len(self.trials), 0)
        order = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.RUNNING)
        parts = [f"{counts[state]} {state}" for state in order if state in counts]
        parts += [f"{waiting} waiting"] if waiting else []
        count = max(self.total, len(self.trials))
        text = f"{count} trial{'s' if count != 1 else ''}: {', '.join(parts)}"
        if (best := self.best) is not None:
            value = self.value(best)
            text += f" · best {self.metric} {value:.4g} in trial {best.number}"
        edited = [t.number for t in self.trials.values() if t.code not in ("", self.spec.code)]
        if edited:
            text += f" · modules were edited before {_numbered(edited)} began"
        return text

    def heads(self) -> list[str]:
        listed = self.trials.values()
        heads = ["", "trial", *self.parameters, "state", self.metric or "value"]
        heads += ["step"] if self.spec.metric is not None else []
        heads += ["time"]
        if any(trial.cost is not None for trial in listed):
            heads.append("cost")
        elif any(trial.chip_hours is not None for trial in listed):
            heads.append("chip hours")
        heads += ["where", "run"]
        return heads + (["error"] if any(trial.error for trial in listed) else [])

    def row(self, trial: Trial, heads: Sequence[str], best: Trial | None) -> list[str]:
        value = self.value(trial)
        took = trial.duration
        if trial.state is TrialState.RUNNING and trial.started is not None:
            took = time.time() - trial.started
        values = {
            "": BEST if best is not None and trial.number == best.number else "",
            "trial": str(trial.number),
            "state": str(trial.state),
            "step": "" if trial.step is None else f"{trial.step:,}",
            "time": "" if took is None else duration(took),
            "cost": "" if trial.cost is None else f"${trial.cost:.2f}",
            "chip hours": "" if trial.chip_hours is None else f"{trial.chip_hours:.2f}",
            "where": self.spec.place or "here" if trial.started else "",
            "run": trial.run,
            "error": excerpt(trial.error, _LONGEST_ERROR) if trial.error else "",
        }
        if trial.copied_from:
            values["time"] = "ran before"
        row = [values.get(head, "") for head in heads]
        for place, name in enumerate(self.parameters, start=2):
            row[place] = _shown(trial.parameters.get(name))
        column = 2 + len(self.parameters) + 1
        row[column] = "" if value is None else f"{value:.4g}"
        return row

    def text(self, most: int | None = ROWS, width: int | None = None) -> str:
        """Return the table for a terminal.

        `most`: maximum number of rows; a line gives the number of other rows; None: all rows.
        `width`: columns of the terminal; the least important columns are left out until it fits.
        """
        heads, best = self.heads(), self.best
        listed = self.sorted()
        shown = _chosen(listed, most)
        rows = [heads, *(self.row(trial, heads, best) for trial in shown)]
        state = 2 + len(self.parameters)
        if width is not None:
            rows = _fitted(rows, width, state + 1)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [paint(self.headline(), Style.STRONG)]
        for trial, row in zip([None, *shown], rows, strict=True):
            columns: list[str] = [v.ljust(w) for v, w in zip(row, widths, strict=True)]
            columns[-1] = columns[-1].rstrip()
            if trial is None:
                lines.append(paint("  ".join(columns), Style.FAINT))
            else:
                columns[state] = paint(columns[state], _STYLES[trial.state], end=len(row[state]))
                lines.append(join("  ", columns))
        if len(shown) < len(listed):
            lines.append(paint(f"and {len(listed) - len(shown):,} more", Style.FAINT))
        return join("\n", lines)

    def html(self, note: str = "", most: int = ROWS) -> str:
        """Return the table for a notebook: plain elements, and styles that saved notebooks keep."""
        heads, best = self.heads(), self.best
        columns = _cells("th", heads, "text-align:left;padding:2px 8px;opacity:0.7")
        lines = [f"<tr>{columns}</tr>"]
        state = 2 + len(self.parameters)
        listed = self.sorted()
        shown = _chosen(listed, most)
        for trial in shown:
            row = self.row(trial, heads, best)
            style = "text-align:left;padding:2px 8px"
            cells = [_cells("td", [value], style) for value in row]
            colour = _COLOURS.get(trial.state)
            if colour is not None:
                border = f"{style};border-left:3px solid {colour}"
                cells[state] = _cells("td", [row[state]], border)
            weight = ' style="font-weight:bold"' if row[0] else ""
            lines.append(f"<tr{weight}>{''.join(cells)}</tr>")
        head = f'<div style="padding:2px 8px"><b>{escape(self.headline())}</b></div>'
        body = f'<div style="overflow-x:auto"><table>{"".join(lines)}</table></div>'
        notes = [f"and {len(listed) - len(shown):,} more"] if len(shown) < len(listed) else []
        notes += [note] if note else []
        tails = [f'<div style="opacity:0.7;padding:2px 8px">{escape(text)}</div>' for text in notes]
        running = any(trial.state is TrialState.RUNNING for trial in self.trials.values())
        frame = _COLOURS[TrialState.RUNNING] if running else GREY
        return framed(frame, [head, body, *tails]).replace("max-width:860px;", "")


def _fitted(rows: Sequence[list[str]], width: int, keep: int) -> list[list[str]]:
    """Return the columns that fit into `width`; the first row holds their names.

    Columns of _LEAST beyond the first `keep` are left out, and errors are shortened.
    """
    columns = [list(column) for column in zip(*rows, strict=True)]
    errors = columns[-1] if columns[-1][0] == "error" else None

    def taken() -> int:
        widths = [max(map(len, column)) for column in columns]
        if errors is not None:
            widths[-1] = min(widths[-1], _SHORTEST_ERROR)
        return sum(widths) + 2 * (len(widths) - 1)

    for head in _LEAST:
        if taken() > width:
            columns = [c for n, c in enumerate(columns) if n < keep or c[0] != head]
    if errors is not None:
        room = width - taken() + min(max(map(len, errors)), _SHORTEST_ERROR)
        columns[-1] = [excerpt(text, max(room, 1)) if text else "" for text in errors]
    return [list(row) for row in zip(*columns, strict=True)]


def _has_several(tried: object) -> bool:
    """True if a parameter's part of the space (its `to_json`) has more than one value."""
    return isinstance(tried, Mapping) or (isinstance(tried, (list, tuple)) and len(tried) > 1)


def _chosen(listed: Sequence[Trial], most: int | None) -> list[Trial]:
    """Choose `most` trials: the running ones, some of the failed ones, and the best."""
    if most is None or len(listed) <= most:
        return list(listed)
    running = [trial.number for trial in listed if trial.state is TrialState.RUNNING]
    failed = [trial.number for trial in listed if trial.state is TrialState.FAILED]
    first = [*running, *failed[: most // 4]]
    kept = dict.fromkeys([*first, *(trial.number for trial in listed)])
    numbers = set(list(kept)[:most])
    return [trial for trial in listed if trial.number in numbers]


def _numbered(trials: Sequence[int]) -> str:
    """Return 'trial 3' or '5 of the trials'."""
    return f"trial {trials[0]}" if len(trials) == 1 else f"{len(trials)} of the trials"


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return excerpt(str(value), _LONGEST_VALUE)


def _cells(tag: str, values: Iterable[str], style: str) -> str:
    return "".join(f'<{tag} style="{style}">{escape(value)}</{tag}>' for value in values)
