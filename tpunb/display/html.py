"""The card of a run as HTML: plain boxes, one badge for each rank, a sparkline for each metric.

It must be readable in every front end, light or dark, trusted or not. So it has only inline styles
that JupyterLab's sanitiser keeps, colours only in borders and bars, no scripts and no inline SVG;
" · " is real text, for front ends that remove all styles. Every update replaces the whole card, so
until the last one it contains nothing that can be opened or typed into.
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
from tpunb.utils.text import excerpt, name_ranks

STOP, STOP_NOW, LEAVE = "Stop", "Stop now", "Stop following"
"""Labels of the button: the first press stops the run, the second skips the grace period; in a cell
that only follows a run, a press leaves it running."""
_BUTTON = (
    '<button data-commandlinker-command="notebook:interrupt-kernel" '
    'data-commandlinker-args="{}" style="font-size:12px;padding:0 8px">'
)
"""JupyterLab and Notebook 7 run the command themselves, without widgets or other JavaScript."""
_FAINT = "opacity:0.7"
MAX_TRACEBACK = 4_000
"""Maximum characters of a traceback in a card."""


# Badges of ranks

BEHIND_STEPS = 3
"""Minimum number of steps by which a rank that is shown as behind must be behind."""
BEHIND_SECONDS = 1.5
"""Minimum lag in seconds of such a rank: ranks report twice a second, not at the same time."""
MAX_NUMBERED = 32
"""Maximum number of ranks for which each badge shows its number."""
MAX_ODD = 16
"""Maximum number of failed and late ranks with a number if there are more.

The card of an active run has at most 10 kB, and 12 kB if everything in it is long.
"""
MAX_NAME = 24
"""Maximum characters of a rank's name on its badge; a longer one is shown without the host."""
MAX_LINE = 100
"""Maximum characters of a source line, or of a line of output that is not finished."""
MAX_TEXT = 600
"""Maximum characters of a cause and of a fix."""
_MAX_UNBROKEN = 30
"""Maximum characters of a cell of a table that is not wrapped."""
MAX_NAMES = 60
"""Maximum characters of a list of ranks in the same state."""
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
    """The state of one rank: a word, and possibly details."""

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
        """True if the rank has failed, is behind, or blocks the others."""
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
    """Return the badges of all ranks.

    Args:
        world_size: The number of ranks.
        life: The last report of each rank.
        exits: Exit codes of the ranks that have ended.
        failed: Ranks that failed by themselves.
        speed: Steps per second of the fastest rank.
        hung: True if the run ended as hung: ranks that the others waited for are marked.
        lost: Ranks of lost hosts.
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
            # The distance, as the rank's own step number would differ from those in the log.
            badge = RankBadge("behind", f"{furthest - state.steps:,} steps")
        elif state.compiling:
            badge = RankBadge("compiling")
        else:
            badge = RankBadge("running")
        badges.append(badge)
    return badges


def describe_badges(badges: Sequence[RankBadge], hosts: Sequence[str] = ()) -> str:
    """Describe badges, largest group first: 'ranks 0-14,16 running · rank 15 behind (12 steps)'."""
    groups: dict[RankBadge, list[int]] = {}
    for rank, badge in enumerate(badges):
        groups.setdefault(badge, []).append(rank)
    parts = []
    for badge, ranks in sorted(groups.items(), key=lambda group: -len(group[1])):
        names = name_ranks(ranks, hosts, len(badges))
        if len(names) > MAX_NAMES:  # if there are many hosts: the numbers alone
            names = _shortened(name_ranks(ranks))
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {names} {badge}")
    return " · ".join([*parts[:5], *([f"and {len(parts) - 5} more"] if len(parts) > 5 else [])])


def _shortened(names: str) -> str:
    """Shorten a long list to '0,2,4,…'."""
    return names if len(names) <= MAX_NAMES else f"{names[:MAX_NAMES].rpartition(',')[0]},…"


def badges_html(badges: Sequence[RankBadge], hosts: Sequence[str] = ()) -> str:
    """Return the badges, and below them their description."""
    names = [name_ranks([rank], hosts, len(badges)) for rank in range(len(badges))]
    names = [name if len(name) <= MAX_NAME else str(rank) for rank, name in enumerate(names)]
    row = (_numbered_row if len(badges) <= MAX_NUMBERED else _glyph_row)(badges, names)
    return f'{row}<div style="{_FAINT}">{escape(describe_badges(badges, hosts))}</div>'


def _numbered_row(badges: Sequence[RankBadge], names: Sequence[str]) -> str:
    boxes = []
    for name, badge in zip(names, badges, strict=True):
        width = 2 if badge.is_odd else 1
        style = f"border:{width}px solid {badge.colour};border-radius:4px;padding:0 6px"
        label = f"{badge.glyph} {escape(name)}"
        title = escape(f"rank {name}: {badge}", quote=True)
        inner = f"<b>{label}</b>" if badge.is_odd else label
        boxes.append(f'<span title="{title}" style="{style}">{inner}</span>')
    # The height of the lines separates the rows; a margin in each box would take more bytes.
    return f'<div style="line-height:2">{" ".join(boxes)}</div>'


def _glyph_row(badges: Sequence[RankBadge], names: Sequence[str]) -> str:
    """Return a glyph for each of many ranks; odd ranks get a box with their number."""
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
"""Maximum number of chips with a box each; more chips are summarised in a line."""


def describe_some_chips(chips: Sequence[Chip]) -> list[str]:
    """Describe each chip, or many together: 'chip 0: 12.1 of 16.0 GB, 87 % busy'."""
    if len(chips) > MAX_CHIPS:
        return [f"{len(chips)} {describe_chips([replace(c, mean_duty=None) for c in chips])}"]
    return [str(chip) for chip in chips]


def chips_html(chips: Sequence[Chip]) -> str:
    """Return a box for each chip, with its memory and, as a bar, its duty cycle."""
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
        title = escape(f"{chip} (memory in use; duty cycle)", quote=True)
        bar = f'<div style="{track}"><div style="{busy}"></div></div>'
        boxes.append(f'<div title="{title}" style="{style}">{escape(str(chip))}{bar}</div>')
    return f"<div>{' '.join(boxes)}</div>"


# Sparklines of metrics

POINTS = 40
"""Points of a sparkline. When there are twice as many, pairs are averaged: its size is bounded."""
WIDTH, HEIGHT = 120, 26
"""Size of a sparkline in pixels."""


@dataclass
class Sparkline:
    """The course of one metric, small enough for a card."""

    values: list[float] = field(default_factory=list)
    """At most 2 × POINTS means of equally many values, in order."""
    _each: int = 1
    _sum: float = 0.0
    _count: int = 0

    def add(self, value: float) -> None:
        """Add the next value; NaN and infinite values are left out."""
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
        """True if there are two different values."""
        return any(not math.isclose(value, self.values[0]) for value in self.values)

    def heights(self) -> list[float]:
        """Return at most POINTS numbers from 0 (the lowest) to 1; 0.5 if all are equal.

        Values that differ only by rounding, as means over ranks do, count as equal.
        """
        step = max(1, math.ceil(len(self.values) / POINTS))
        means = [
            sum(part) / len(part)
            for part in (self.values[i : i + step] for i in range(0, len(self.values), step))
        ]
        low, high = min(means, default=0.0), max(means, default=0.0)
        if math.isclose(low, high):
            return [0.5] * len(means)
        return [(value - low) / (high - low) for value in means]

    def image(self, colour: str) -> str:
        """Return the picture as a data URL: front ends keep it, but remove inline SVG."""
        heights = self.heights()
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
    """Return an SVG picture as a data URL."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


PANEL = "tpunb-panel"
"""The class of a panel's widgets, which are hidden once the kernel is gone."""


def silence_line(after: float) -> str:
    """Return a line that says after some seconds that the card is out of date.

    Each update of the card replaces it, so only a page that no longer gets updates, because its
    kernel was restarted or the page reopened, shows the text. A notebook that is not trusted, as
    a reopened one, loses the style that hides it.
    """
    style = (
        f"@keyframes tpunb-silence{{to{{max-block-size:9em}}}}"
        f".{PANEL}.jupyter-widgets-disconnected{{display:none}}"
    )
    hidden = f"max-block-size:0;overflow:hidden;animation:tpunb-silence 1ms {after:.0f}s forwards"
    text = "no longer connected: %load_ext tpunb, then %tpu_attach, in any cell show the run"
    return f'<style>{style}</style><div style="{hidden}">{text}</div>'


# The card


@dataclass(frozen=True)
class CardMetric:
    """A metric on the card: its newest value and its course."""

    name: str
    value: str
    sparkline: Sparkline = field(default_factory=lambda: Sparkline())
    chart: str = ""
    """Picture that replaces everything once the run has ended, as HTML; it has a title."""


@dataclass(frozen=True)
class FailureDetails:
    """Place, cause and fix of a run's failure, followed by the traceback."""

    failure: Failure
    cause: str = ""
    fix: str = ""
    traceback: str = ""
    """The traceback, shown folded; '' if it is shown elsewhere."""
    link: bool = False
    """True to show a link to the cell."""
    source: str = ""
    """URL of the cause's documentation."""

    @classmethod
    def of(
        cls, result: RunResult, *, traceback: bool = False, link: bool = False
    ) -> FailureDetails | None:
        """Return the details of a failed run, with its `traceback` and a `link` to its cell."""
        if result.failure is None:
            return None
        diagnosis = result.diagnoses[0] if result.diagnoses else None
        cause, fix = (diagnosis.cause, diagnosis.fix) if diagnosis else ("", "")
        source = diagnosis.link if diagnosis else ""
        text = result.failure.traceback if traceback else ""
        if (excess := len(text) - MAX_TRACEBACK) > 0:  # keep more of the end, which matters most
            left_out = f"… {excess:,} characters left out; all are in run.log …\n"
            text = text[: MAX_TRACEBACK // 4] + left_out + text[-MAX_TRACEBACK * 3 // 4 :]
        return cls(result.failure, cause, fix, text, link, source)

    def lines(self) -> list[str]:
        failure = self.failure
        lines = [*number_lines(failure.source, failure.line), *self._places()]
        lines += [f"{label}: {text}" for label, text in self._advice()]
        lines += [f"See: {self.source}"] if self.source else []
        return [*lines, *self.traceback.rstrip().splitlines()]

    def html(self) -> str:
        failure, parts = self.failure, []
        if self.link and failure.cell_id is not None:
            href = escape(f"#cell-id={failure.cell_id}", quote=True)
            line = f", line {failure.line}" if failure.line is not None else ""
            parts.append(f'<div><a href="{href}">go to cell [{failure.cell}]{line}</a></div>')
        if failure.source:
            numbered = number_lines(failure.source, failure.line)
            lines = [escape(excerpt(text, MAX_LINE)) for text in numbered]
            for at, (number, _) in enumerate(failure.source):
                if number == failure.line:
                    lines[at] = f"<b>{lines[at]}</b>"
            parts.append(preformatted("\n".join(lines)))
        if places := self._places():
            shown = "\n".join(excerpt(place, MAX_LINE) for place in places)
            parts.append(preformatted(escape(shown)))
        parts += [
            f"<div><b>{label}:</b> {escape(excerpt(text, MAX_TEXT))}</div>"
            for label, text in self._advice()
        ]
        if self.source:
            href = escape(self.source, quote=True)
            parts.append(f'<div><b>See:</b> <a href="{href}">{href}</a></div>')
        if self.traceback:
            folded = preformatted(escape(self.traceback.rstrip()))
            parts.append(f"<details><summary>traceback</summary>{folded}</details>")
        return "".join(parts)

    def _places(self) -> list[str]:
        """Return the position of each rank, if the run hung."""
        return self.failure.message.splitlines()[1:] * (self.failure.kind is FailureKind.HANG)

    def _advice(self) -> list[tuple[str, str]]:
        return [(label, text) for label, text in (("Why", self.cause), ("Fix", self.fix)) if text]


def preformatted(inner: str) -> str:
    """Return a block of code or output; `inner` is HTML."""
    style = (
        "margin:6px 0;padding:6px 10px;background-color:rgba(128,128,128,0.13);"
        "border-radius:4px;overflow:auto;font-family:monospace;word-break:normal"
    )
    return f'<pre style="{style}">{inner}</pre>'


def framed(colour: str, rows: Iterable[str]) -> str:
    """Return the rows of a card in a frame whose left border has this colour."""
    style = (
        "border:1px solid rgba(128,128,128,0.35);"
        f"border-left:4px solid {colour};border-radius:6px;padding:6px 12px;"
        "margin:2px 0;max-width:860px;line-height:1.5"
    )
    return f'<div style="{style}">{"".join(rows)}</div>'


def table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table; `rows`: the colour of each row's left border, and its cells."""

    def cells(kind: str, texts: Sequence[str], border: str) -> str:
        found = []
        for text in texts:
            wrap = "normal;min-width:200px" if len(text) > _MAX_UNBROKEN else "nowrap"
            style = f"text-align:left;vertical-align:top;padding:2px 10px;white-space:{wrap}"
            found.append(f'<{kind} style="{style};{border}">{escape(text)}</{kind}>')
            border = ""
        return f"<tr>{''.join(found)}</tr>"

    head = cells("th", heads, "border-left:4px solid transparent")
    body = [cells("td", row, f"border-left:4px solid {colour}") for colour, row in rows]
    style = "border-collapse:collapse;margin:2px 0"
    return f'<div style="overflow:auto"><table style="{style}">{head}{"".join(body)}</table></div>'


@dataclass(frozen=True)
class Card:
    """The contents of a run's card; parts that are None or empty are not shown."""

    colour: str
    state: str
    facts: Sequence[str]
    """Facts after the state: ranks, device, time."""
    aside: str
    """The run's folder and the time of the update."""
    stop: str = ""
    """Label of the button that stops the run; '' for no button."""
    share: float | None = None
    progress: str = ""
    metrics: Sequence[CardMetric] = ()
    more: str = ""
    """Number of metrics that are left out."""
    badges: Sequence[RankBadge] = ()
    hosts: Sequence[str] = ()
    """Names of the hosts that the ranks run on, if there are several."""
    speeds: Sequence[str] = ()
    chips: Sequence[Chip] = ()
    summary: Sequence[str] = ()
    """Best values and use of time, once the run has ended."""
    silence: str = ""
    """Line that says in a while that the card is out of date, as HTML; '' for a card that stays."""
    lines: Sequence[str] = ()
    """Progress bars and unfinished lines of output."""
    failure: FailureDetails | None = None
    remarks: Sequence[str] = ()
    """Notes on the run; other failures, missing values and how to continue, once it has ended."""
    fold: Sequence[str] = ()
    """Lines that are shown after a click."""
    earlier: Sequence[str] = ()
    """A line for each run before it in a loop."""

    def html(self) -> str:
        head = f"<b>{escape(self.state)}</b>" + "".join(f" · {escape(f)}" for f in self.facts)
        button = f" · {_BUTTON}{escape(self.stop)}</button>" if self.stop else ""
        rows = [f'<div style="{_FAINT}">{escape(line)}</div>' for line in self.earlier]
        rows.append(f"<div>{head}{button}</div>")
        if self.failure is not None:
            rows.append(self.failure.html())
        rows += [f"<div>{escape(excerpt(line, MAX_TEXT))}</div>" for line in self.remarks]
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
        if self.lines:
            text = escape("\n".join(self.lines))
            style = "margin:4px 0 0 0;padding:0;white-space:pre-wrap"
            rows.append(f'<pre style="{style}">{text}</pre>')
        if self.fold:
            text = "".join(f"<div>{escape(excerpt(line, MAX_TEXT))}</div>" for line in self.fold)
            rows.append(f"<details><summary>more</summary>{text}</details>")
        if self.aside:
            rows.append(f'<div style="{_FAINT}">{escape(self.aside)}</div>')
        if self.silence:
            rows.append(self.silence)
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
        return f'{bar}<div style="{_FAINT}">{escape(excerpt(self.progress, MAX_LINE))}</div>'

    def _metrics(self) -> str:
        cells = []
        for metric in sorted(self.metrics, key=lambda metric: bool(metric.chart)):
            picture = ""
            if metric.chart:
                cells.append(f'<div style="margin:0 8px 2px 0">{metric.chart}</div>')
                continue
            if metric.sparkline.varies:
                values = metric.sparkline.values
                alt = f"from {values[0]:.3g} to {values[-1]:.3g}"
                picture = (
                    f' <img width="{WIDTH}" height="{HEIGHT}" alt="{alt}" '
                    f'style="vertical-align:middle" src="{metric.sparkline.image(self.colour)}">'
                )
            cells.append(
                f'<div style="margin:0 8px 2px 0"><span style="{_FAINT}">'
                f"{escape(excerpt(metric.name, MAX_NAMES))}</span> "
                f"<b>{escape(metric.value)}</b>{picture}</div>"
            )
        if self.more:
            cells.append(f'<div style="{_FAINT}">{escape(self.more)}</div>')
        # Margins separate the metrics; the dot is for front ends that remove all styles.
        between = '<span style="opacity:0"> · </span>'
        return (
            f'<div style="display:flex;flex-wrap:wrap;margin-top:6px">{between.join(cells)}</div>'
        )
