"""The card of a run as HTML: plain boxes, one badge for each rank, a sparkline for each metric.

It must read in every front end, light or dark, trusted or not: inline styles only, of those
that JupyterLab's sanitiser keeps; the text's own colour, and colours only in borders and bars;
no scripts, no inline SVG; " · " as real text, so that it still reads where all styles are
removed. Every update replaces the whole card, so until the last one it holds nothing that can be
opened or typed into.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from tpunb.runs.chips import Chip, describe_chips
from tpunb.runs.events import RankSnapshot
from tpunb.runs.result import Failure, RunResult, number_lines
from tpunb.runs.spec import FailureKind
from tpunb.utils.text import name_ranks

STOP, STOP_NOW, LEAVE = "Stop", "Stop now", "Stop following"
"""Labels of the button: the first press stops the run, the second does not wait until ranks have
saved; in a cell that only follows a run, the run continues."""
_BUTTON = (
    '<button data-commandlinker-command="notebook:interrupt-kernel" '
    'data-commandlinker-args="{}" style="font-size:12px;padding:0 8px">'
)
"""JupyterLab and Notebook 7 run the command; it needs neither widgets nor JavaScript of ours."""
_FAINT = "opacity:0.7"
MAX_TRACEBACK = 4_000
"""Characters of a traceback in a card."""


# Badges of ranks

BEHIND_STEPS = 3
"""Steps that a rank must be behind the others to be called behind …"""
BEHIND_SECONDS = 1.5
"""… and seconds: each rank reports its steps twice a second, at moments of its own."""
MAX_NUMBERED = 32
"""Up to this many ranks, each badge shows its number …"""
MAX_ODD = 16
"""… and beyond, this many of the failed and late ones: a card is at most 10 kB."""
MAX_NAMES = 60
"""Characters of a list of ranks in the same state."""
_GREEN, _BLUE, _YELLOW, _RED, GREY = "#2da44e", "#2f81f7", "#bf8700", "#e5534b", "#808080"
_GLYPHS = {
    "running": ("●", _GREEN),
    "compiling": ("◐", _BLUE),
    "behind": ("▲", _YELLOW),
    "blocking the others": ("▲", _YELLOW),
    "starting": ("·", GREY),
    "done": ("✓", _GREEN),
    "failed": ("✕", _RED),
    "lost": ("✕", _RED),
    "stopped": ("○", GREY),
}
_ODD = ("failed", "lost", "behind", "blocking the others")


@dataclass(frozen=True)
class RankBadge:
    """What one rank is doing: a word, and details where there are any."""

    word: str
    detail: str = ""

    @property
    def glyph(self) -> str:
        return _GLYPHS[self.word][0]

    @property
    def colour(self) -> str:
        return _GLYPHS[self.word][1]

    @property
    def is_odd(self) -> bool:
        """True if it deserves a look: the rank has failed, is late, or blocks the others."""
        return self.word in _ODD

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})" if self.detail else self.word


def rank_badges(
    world_size: int,
    life: Sequence[RankSnapshot | None],
    exits: Mapping[int, int],
    failed: Iterable[int],
    speed: float = 0.0,
    *,
    hung: bool = False,
    lost: Collection[int] = (),
) -> list[RankBadge]:
    """The badges of all ranks.

    Args:
        world_size: How many ranks there are.
        life: What each rank last reported.
        exits: Exit codes of the ranks that have ended.
        failed: Ranks that failed by themselves.
        speed: Steps a second of the fastest rank.
        hung: The run ended as hung: ranks that the others waited for are marked.
        lost: Ranks of hosts that were lost.
    """
    at_fault = set(failed)
    waiting = {rank for rank, state in enumerate(life) if hung and state and state.waiting}
    alive = [state for rank, state in enumerate(life) if state and rank not in exits]
    furthest = max((state.steps for state in alive), default=0)
    badges = []
    for rank in range(world_size):
        state = life[rank] if rank < len(life) else None
        if rank in at_fault:
            badge = RankBadge("failed")
        elif rank in lost:
            badge = RankBadge("lost")
        elif waiting and rank not in waiting:
            badge = RankBadge("blocking the others")
        elif rank in exits:
            badge = RankBadge("done" if exits[rank] == 0 else "stopped")
        elif state is None or not state.begun:
            badge = RankBadge("starting")
        elif furthest - state.steps >= max(BEHIND_STEPS, BEHIND_SECONDS * speed):
            # How far: a step's number would be another than those of the log and of the progress.
            badge = RankBadge("behind", f"{furthest - state.steps:,} steps")
        elif state.compiling:
            badge = RankBadge("compiling")
        else:
            badge = RankBadge("running")
        badges.append(badge)
    return badges


def describe_badges(badges: Sequence[RankBadge], hosts: Sequence[str] = ()) -> str:
    """'ranks 0-14,16 running · rank 15 behind (12 steps)', the largest group first."""
    groups: dict[RankBadge, list[int]] = {}
    for rank, badge in enumerate(badges):
        groups.setdefault(badge, []).append(rank)
    parts = []
    for badge, ranks in sorted(groups.items(), key=lambda group: -len(group[1])):
        names = name_ranks(ranks, hosts, len(badges))
        if len(names) > MAX_NAMES:  # as of many hosts: the numbers alone
            names = _shortened(name_ranks(ranks))
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {names} {badge}")
    return " · ".join([*parts[:5], *([f"and {len(parts) - 5} more"] if len(parts) > 5 else [])])


def _shortened(names: str) -> str:
    """'0,2,4,…' for a long list."""
    return names if len(names) <= MAX_NAMES else f"{names[:MAX_NAMES].rpartition(',')[0]},…"


def badges_html(badges: Sequence[RankBadge], hosts: Sequence[str] = ()) -> str:
    """The badges, and below them the same in words."""
    names = [name_ranks([rank], hosts, len(badges)) for rank in range(len(badges))]
    row = (_numbered_row if len(badges) <= MAX_NUMBERED else _glyph_row)(badges, names)
    return f'{row}<div style="{_FAINT}">{escape(describe_badges(badges, hosts))}</div>'


def _numbered_row(badges: Sequence[RankBadge], names: Sequence[str]) -> str:
    """One box with its number for each rank."""
    boxes = []
    for name, badge in zip(names, badges, strict=True):
        style = (
            f"display:inline-block;border:{2 if badge.is_odd else 1}px solid {badge.colour};"
            "border-radius:4px;padding:0 6px;margin:0 4px 3px 0"
        )
        label = f"{badge.glyph} {escape(name)}"
        title = escape(f"rank {name}: {badge}", quote=True)
        inner = f"<b>{label}</b>" if badge.is_odd else label
        boxes.append(f'<span title="{title}" style="{style}">{inner}</span>')
    return f"<div>{' '.join(boxes)}</div>"


def _glyph_row(badges: Sequence[RankBadge], names: Sequence[str]) -> str:
    """For many ranks: glyphs alone, and the odd ones with their numbers."""
    pieces = []
    odd = 0
    for name, badge in zip(names, badges, strict=True):
        odd += badge.is_odd
        if badge.is_odd and odd <= MAX_ODD:
            title = escape(f"rank {name}: {badge}", quote=True)
            style = f"border:2px solid {badge.colour};border-radius:4px;padding:0 2px"
            pieces.append(f' <b title="{title}" style="{style}">{badge.glyph} {escape(name)}</b> ')
        else:
            pieces.append(badge.glyph)
    style = "font-family:monospace;word-break:break-all;line-height:1.5"
    return f'<div style="{style}">{"".join(pieces)}</div>'


# Chips

MAX_CHIPS = 16
"""Up to this many, each chip has its box; beyond, a line says what is usual and what is odd."""


def describe_some_chips(chips: Sequence[Chip]) -> list[str]:
    """'chip 0: 12.1 of 16.0 GB, 87 % busy' of each chip, or of many of them together."""
    if len(chips) > MAX_CHIPS:
        return [f"{len(chips)} {describe_chips([replace(c, mean_duty=None) for c in chips])}"]
    return [str(chip) for chip in chips]


def chips_html(chips: Sequence[Chip]) -> str:
    """A box for each chip: how full its memory is, and as a bar how busy it was."""
    if len(chips) > MAX_CHIPS:
        return f"<div>{escape(describe_some_chips(chips)[0])}</div>"
    boxes = []
    for chip in chips:
        style = (
            f"display:inline-block;border:1px solid {GREY};border-radius:4px;padding:0 6px 3px 6px;"
            "margin:0 4px 3px 0"
        )
        busy = f"width:{min(max(chip.duty, 0.0), 100.0):.0f}%;height:3px;background-color:{_BLUE}"
        track = "height:3px;background-color:rgba(128,128,128,0.25)"
        title = escape(f"{chip} (HBM in use; duty cycle of its TensorCore)", quote=True)
        bar = f'<div style="{track}"><div style="{busy}"></div></div>'
        boxes.append(f'<div title="{title}" style="{style}">{escape(str(chip))}{bar}</div>')
    return f"<div>{' '.join(boxes)}</div>"


# Sparklines of metrics

POINTS = 40
"""Points of a sparkline. Beyond twice as many, pairs are averaged, so its size is bounded."""
WIDTH, HEIGHT = 120, 26
"""Pixels."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass
class Sparkline:
    """The course of one metric, small enough for a line of text or of a card."""

    values: list[float] = field(default_factory=list)
    """At most 2 × POINTS means of equally many values, in order."""
    _each: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Add the next value. NaN and infinite ones are left out."""
        if not math.isfinite(value):
            return
        self._sum += value
        self._count += 1
        if self._count < self._each:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) >= 2 * POINTS:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = [(a + b) / 2 for a, b in pairs]
            self._each *= 2

    @property
    def varies(self) -> bool:
        """Whether there is anything to see."""
        return any(not math.isclose(value, self.values[0]) for value in self.values)

    def heights(self, points: int) -> list[float]:
        """At most `points` numbers from 0 (the lowest) to 1; 0.5 where all are equal.

        Values that differ by rounding only, as means over ranks do, count as equal.
        """
        step = max(1, math.ceil(len(self.values) / points))
        means = [
            sum(part) / len(part)
            for part in (self.values[i : i + step] for i in range(0, len(self.values), step))
        ]
        low, high = min(means, default=0.0), max(means, default=0.0)
        if math.isclose(low, high):
            return [0.5] * len(means)
        return [(value - low) / (high - low) for value in means]

    def text(self, points: int = 10) -> str:
        """'█▅▃▂▁▁', or '' before there are two different values."""
        heights = self.heights(points)
        if not self.varies:
            return ""
        return "".join(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in heights)

    def image(self, colour: str) -> str:
        """A data URL: front ends keep pictures, and drop inline SVG."""
        heights = self.heights(POINTS)
        step = (WIDTH - 6) / max(1, len(heights) - 1)
        points = [
            f"{3 + index * step:.0f},{HEIGHT - 3 - height * (HEIGHT - 6):.0f}"
            for index, height in enumerate(heights)
        ]
        x, y = points[-1].split(",")
        return svg_url(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">'
            f'<polyline points="{" ".join(points)}" fill="none" stroke="#7d8590" '
            f'stroke-width="1.5"/><circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/></svg>'
        )


def svg_url(svg: str) -> str:
    """The picture as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


# The card


@dataclass(frozen=True)
class CardMetric:
    """A metric on the card: its newest value and its course."""

    name: str
    value: str
    sparkline: Sparkline = field(default_factory=lambda: Sparkline())
    chart: str = ""
    """Of a run that has ended: a picture in its place, as HTML."""


@dataclass(frozen=True)
class FailureDetails:
    """Where a run failed, why, what to do, and only then the traceback."""

    failure: Failure
    cause: str = ""
    fix: str = ""
    traceback: str = ""
    """Shown folded; empty where the traceback is shown elsewhere."""
    link: bool = False
    """Whether a link jumps to the cell."""
    source: str = ""
    """Where the cause is documented: a URL."""

    @classmethod
    def of(
        cls, result: RunResult, *, traceback: bool = False, link: bool = False
    ) -> FailureDetails | None:
        """Those of a run that has failed, with its `traceback` and with a `link` to its cell."""
        if result.failure is None:
            return None
        diagnosis = result.diagnoses[0] if result.diagnoses else None
        cause, fix = (diagnosis.cause, diagnosis.fix) if diagnosis else ("", "")
        source = diagnosis.link if diagnosis else ""
        text = result.failure.traceback if traceback else ""
        if (excess := len(text) - MAX_TRACEBACK) > 0:  # the end of it says the most
            left_out = f"… {excess:,} characters left out, all are in run.log …\n"
            text = text[: MAX_TRACEBACK // 4] + left_out + text[-MAX_TRACEBACK * 3 // 4 :]
        return cls(result.failure, cause, fix, text, link, source)

    def lines(self) -> list[str]:
        """The details as text."""
        failure = self.failure
        lines = [*number_lines(failure.source, failure.line), *self._places()]
        lines += [f"{label}: {text}" for label, text in self._advice()]
        lines += [f"See: {self.source}"] if self.source else []
        return [*lines, *self.traceback.rstrip().splitlines()]

    def html(self) -> str:
        """The source lines, why it failed, what to do, and the folded traceback."""
        failure, parts = self.failure, []
        if self.link and failure.cell_id is not None:
            href = escape(f"#cell-id={failure.cell_id}", quote=True)
            line = f", line {failure.line}" if failure.line is not None else ""
            parts.append(f'<div><a href="{href}">go to cell [{failure.cell}]{line}</a></div>')
        if failure.source:
            numbered = number_lines(failure.source, failure.line)
            lines = [
                f"<b>{escape(text)}</b>" if number == failure.line else escape(text)
                for (number, _), text in zip(failure.source, numbered, strict=True)
            ]
            parts.append(preformatted("\n".join(lines)))
        if places := self._places():
            parts.append(preformatted(escape("\n".join(places))))
        parts += [f"<div><b>{label}:</b> {escape(text)}</div>" for label, text in self._advice()]
        if self.source:
            href = escape(self.source, quote=True)
            parts.append(f'<div><b>See:</b> <a href="{href}">{href}</a></div>')
        if self.traceback:
            folded = preformatted(escape(self.traceback.rstrip()))
            parts.append(f"<details><summary>traceback</summary>{folded}</details>")
        return "".join(parts)

    def _places(self) -> list[str]:
        """Of a hang: which rank is where."""
        return self.failure.message.splitlines()[1:] * (self.failure.kind is FailureKind.HANG)

    def _advice(self) -> list[tuple[str, str]]:
        return [(label, text) for label, text in (("Why", self.cause), ("Fix", self.fix)) if text]


def preformatted(inner: str) -> str:
    """Lines of code or output; `inner` is HTML."""
    style = (
        "margin:6px 0;padding:6px 10px;background-color:rgba(128,128,128,0.13);"
        "border-radius:4px;overflow:auto"
    )
    return f'<pre style="{style}">{inner}</pre>'


def framed(colour: str, rows: Iterable[str]) -> str:
    """The rows of a card in their frame, whose left border has this colour."""
    style = (
        "border:1px solid rgba(128,128,128,0.35);"
        f"border-left:4px solid {colour};border-radius:6px;padding:6px 12px;"
        "margin:2px 0;max-width:860px;line-height:1.5"
    )
    return f'<div style="{style}">{"".join(rows)}</div>'


@dataclass(frozen=True)
class Card:
    """What the card of a run shows; None or empty for what does not apply."""

    colour: str
    state: str
    facts: Sequence[str]
    """What comes after the state: ranks, device, time."""
    aside: str
    """Where the run's folder is, and when this was updated."""
    stop: str = ""
    """Label of the button that stops the run; no button without it."""
    share: float | None = None
    progress: str = ""
    metrics: Sequence[CardMetric] = ()
    more: str = ""
    """How many metrics are left out."""
    badges: Sequence[RankBadge] = ()
    hosts: Sequence[str] = ()
    """That the ranks are spread over, if there are several."""
    speeds: Sequence[str] = ()
    chips: Sequence[Chip] = ()
    summary: Sequence[str] = ()
    """At the end: best values, and where the time went."""
    picture: str = ""
    """Of `--profile`, as HTML: where the time of a step went."""
    lines: Sequence[str] = ()
    """Progress bars and unfinished lines of output."""
    failure: FailureDetails | None = None
    remarks: Sequence[str] = ()
    """At the end: what else has failed or is missing, and how to continue."""

    def html(self) -> str:
        """The card."""
        head = f"<b>{escape(self.state)}</b>" + "".join(f" · {escape(f)}" for f in self.facts)
        button = f" · {_BUTTON}{escape(self.stop)}</button>" if self.stop else ""
        rows = [f"<div>{head}{button}</div>"]
        if self.failure is not None:
            rows.append(self.failure.html())
        rows += [f"<div>{escape(line)}</div>" for line in self.remarks]
        if self.progress:
            rows.append(self._progress())
        if self.metrics:
            rows.append(self._metrics())
        if self.badges:
            rows.append(f'<div style="margin-top:6px">{badges_html(self.badges, self.hosts)}</div>')
        if self.speeds:
            rows.append(f"<div>{escape(' · '.join(self.speeds))}</div>")
        if self.chips:
            rows.append(chips_html(self.chips))
        rows += [f"<div>{escape(line)}</div>" for line in self.summary]
        if self.picture:
            rows.append(f"<div>{self.picture}</div>")
        if self.lines:
            text = escape("\n".join(self.lines))
            style = "margin:4px 0 0 0;padding:0;white-space:pre-wrap"
            rows.append(f'<pre style="{style}">{text}</pre>')
        rows.append(f'<div style="{_FAINT}">{escape(self.aside)}</div>')
        return framed(self.colour, rows)

    def _progress(self) -> str:
        bar = ""
        if self.share is not None:
            track = "height:6px;border-radius:3px;background-color:rgba(128,128,128,0.25)"
            filled = (
                f"width:{100 * self.share:.1f}%;height:6px;border-radius:3px;"
                f"background-color:{self.colour}"
            )
            bar = f'<div style="{track};margin:6px 0 2px 0"><div style="{filled}"></div></div>'
        return f'{bar}<div style="{_FAINT}">{escape(self.progress)}</div>'

    def _metrics(self) -> str:
        cells = []
        for metric in self.metrics:
            picture = ""
            if metric.chart:
                picture = f"<div>{metric.chart}</div>"
            elif metric.sparkline.varies:
                values = metric.sparkline.values
                alt = f"from {values[0]:.3g} to {values[-1]:.3g}"
                picture = (
                    f' <img width="{WIDTH}" height="{HEIGHT}" alt="{alt}" '
                    f'style="vertical-align:middle" src="{metric.sparkline.image(self.colour)}">'
                )
            cells.append(
                f'<div style="margin:0 8px 2px 0"><span style="{_FAINT}">'
                f"{escape(metric.name)}</span> <b>{escape(metric.value)}</b>{picture}</div>"
            )
        if self.more:
            cells.append(f'<div style="{_FAINT}">{escape(self.more)}</div>')
        # Margins keep them apart; the dot is for where all styles are removed.
        between = '<span style="opacity:0"> · </span>'
        return (
            f'<div style="display:flex;flex-wrap:wrap;margin-top:6px">{between.join(cells)}</div>'
        )
