"""The HTML of a run: a card of plain boxes and words.

It must read in every front end, light or dark, trusted or not: inline styles only, of those
that JupyterLab's sanitiser keeps; the text's own colour, and colours only in borders and bars;
no scripts, no inline SVG; " · " as real text, so that it still reads where every style is
taken away. Every update replaces it whole, so until the last one it holds nothing that a person
opens or types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tpunb import telling
from tpunb.display import strip
from tpunb.display.curve import HEIGHT, WIDTH, Curve
from tpunb.display.strip import Mark
from tpunb.models import Failure, RunResult

STOP, STOP_NOW, LEAVE = "Stop", "Stop now", "Stop following"
"""The button's words: the second press does not wait until ranks have saved, and in a cell that
only follows a run the run goes on."""
_BUTTON = (
    '<button data-commandlinker-command="notebook:interrupt-kernel" '
    'data-commandlinker-args="{}" style="font-size:12px;padding:0 8px">'
)
"""JupyterLab and Notebook 7 run the command; it needs neither widgets nor JavaScript of ours."""
_FAINT = "opacity:0.7"
LONGEST = 4_000
"""Characters of a traceback that a card holds."""


@dataclass(frozen=True)
class Metric:
    """A metric as the card shows it."""

    name: str
    value: str
    curve: Curve


@dataclass(frozen=True)
class Why:
    """What is known about a failure: where it was, why, what to do, and only then how."""

    failure: Failure
    cause: str = ""
    fix: str = ""
    traceback: str = ""
    """To be folded; empty where something else shows it."""
    link: bool = False
    """Whether a link jumps to the cell."""

    def lines(self) -> list[str]:
        """The same as text."""
        failure = self.failure
        found = telling.numbered(failure.source, failure.line)
        found += [f"{word}: {text}" for word, text in self._told()]
        return [*found, *self.traceback.rstrip().splitlines()]

    def html(self) -> str:
        """The lines, why it failed, what to do, and the traceback behind a click."""
        failure, parts = self.failure, []
        if self.link and failure.cell_id is not None:
            href = escape(f"#cell-id={failure.cell_id}", quote=True)
            line = f", line {failure.line}" if failure.line is not None else ""
            parts.append(f'<div><a href="{href}">go to cell [{failure.cell}]{line}</a></div>')
        if failure.source:
            numbered = telling.numbered(failure.source, failure.line)
            lines = [
                f"<b>{escape(text)}</b>" if number == failure.line else escape(text)
                for (number, _), text in zip(failure.source, numbered, strict=True)
            ]
            parts.append(pre("\n".join(lines)))
        parts += [f"<div><b>{word}:</b> {escape(text)}</div>" for word, text in self._told()]
        if self.traceback:
            folded = pre(escape(self.traceback.rstrip()))
            parts.append(f"<details><summary>traceback</summary>{folded}</details>")
        return "".join(parts)

    def _told(self) -> list[tuple[str, str]]:
        return [(word, text) for word, text in (("Why", self.cause), ("Fix", self.fix)) if text]


def why(result: RunResult, *, folds: bool = False, links: bool = False) -> Why | None:
    """Of a run that has failed. `folds`: with its traceback; `links`: a link jumps to its cell."""
    if result.failure is None:
        return None
    known = result.diagnoses[0] if result.diagnoses else None
    cause, fix = (known.cause, known.fix) if known else ("", "")
    traceback = result.failure.traceback if folds else ""
    if (left_out := len(traceback) - LONGEST) > 0:  # the end of it says the most
        left = f"… {left_out:,} characters left out, which run.log has …\n"
        traceback = traceback[: LONGEST // 4] + left + traceback[-LONGEST * 3 // 4 :]
    return Why(result.failure, cause, fix, traceback, links)


def pre(inner: str) -> str:
    """Lines as they are."""
    style = (
        "margin:6px 0;padding:6px 10px;background-color:rgba(128,128,128,0.13);"
        "border-radius:4px;overflow:auto"
    )
    return f'<pre style="{style}">{inner}</pre>'


def box(colour: str, parts: Iterable[str]) -> str:
    """The frame of a card around its rows; the colour is its left border's."""
    style = (
        "border:1px solid rgba(128,128,128,0.35);"
        f"border-left:4px solid {colour};border-radius:6px;padding:6px 12px;"
        "margin:2px 0;max-width:860px;line-height:1.5"
    )
    return f'<div style="{style}">{"".join(parts)}</div>'


@dataclass(frozen=True)
class Card:
    """Everything that is shown, in words; None or empty where there is nothing to say."""

    colour: str
    state: str
    facts: Sequence[str]
    """What comes after the state: ranks, device, time."""
    aside: str
    """Where the run's folder is, and when this was updated."""
    stop: str = ""
    """What the button says that stops the run; without it there is none."""
    share: float | None = None
    progress: str = ""
    metrics: Sequence[Metric] = ()
    more: str = ""
    """What is left out of the metrics."""
    marks: Sequence[Mark] = ()
    speeds: Sequence[str] = ()
    summary: Sequence[str] = ()
    """At the end: what came out best, where the time went."""
    lines: Sequence[str] = ()
    """Progress bars and lines without an end."""
    why: Why | None = None

    def html(self) -> str:
        """The card."""
        head = f"<b>{escape(self.state)}</b>" + "".join(f" · {escape(f)}" for f in self.facts)
        button = f" · {_BUTTON}{escape(self.stop)}</button>" if self.stop else ""
        parts = [f"<div>{head}{button}</div>"]
        if self.why is not None:
            parts.append(self.why.html())
        if self.progress:
            parts.append(self._progress())
        if self.metrics:
            parts.append(self._metrics())
        if self.marks:
            parts.append(f'<div style="margin-top:6px">{strip.html(self.marks)}</div>')
        if self.speeds:
            parts.append(f"<div>{escape(' · '.join(self.speeds))}</div>")
        parts += [f"<div>{escape(line)}</div>" for line in self.summary]
        if self.lines:
            text = escape("\n".join(self.lines))
            style = "margin:4px 0 0 0;padding:0;white-space:pre-wrap"
            parts.append(f'<pre style="{style}">{text}</pre>')
        parts.append(f'<div style="{_FAINT}">{escape(self.aside)}</div>')
        return box(self.colour, parts)

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
            if len(metric.curve.values) > 1:
                first, last = metric.curve.values[0], metric.curve.values[-1]
                picture = (
                    f' <img width="{WIDTH}" height="{HEIGHT}" alt="from {first:.3g} to {last:.3g}" '
                    f'style="vertical-align:middle" src="{metric.curve.image(self.colour)}">'
                )
            cells.append(
                f'<div style="margin:0 8px 2px 0"><span style="{_FAINT}">'
                f"{escape(metric.name)}</span> <b>{escape(metric.value)}</b>{picture}</div>"
            )
        if self.more:
            cells.append(f'<div style="{_FAINT}">{escape(self.more)}</div>')
        # Apart by their margins; the dot is for where every style is taken away.
        between = '<span style="opacity:0"> · </span>'
        return (
            f'<div style="display:flex;flex-wrap:wrap;margin-top:6px">{between.join(cells)}</div>'
        )
