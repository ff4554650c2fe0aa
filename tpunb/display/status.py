"""The status of a run in one line, as text and as HTML.

The HTML must read in every front end, light or dark, trusted or not: inline styles only, of
those that JupyterLab's sanitiser keeps; the text's own colour; no scripts, and " · " as real
text, so that it still reads where every style is taken away.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Sequence

from tpunb import communication
from tpunb.events import (
    Ended,
    Event,
    Metric,
    Note,
    Output,
    Phase,
    RankEnded,
    RanksStarted,
    Stopping,
)
from tpunb.models import RunResult, RunSpec

MOST_METRICS = 6
MOST_UNFINISHED = 8
LONGEST_STATE = 200

_RUNNING, _STOPPING, _GOOD, _BAD = "#2f81f7", "#bf8700", "#2da44e", "#e5534b"
_ENDED = {
    "succeeded": _GOOD,
    "failed": _BAD,
    "hung": _BAD,
    "timed_out": _BAD,
    "interrupted": _STOPPING,
}
_WORDS = {"timed_out": "stopped at the time-out", "interrupted": "stopped"}


class Status:
    """What is known of a run now, built up from its events.

    `place` is its folder, `age` the seconds since it began.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: str,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        age: float = 0.0,
    ) -> None:
        self._spec = spec
        self._place = place
        self._clock = clock
        self._wall = wall
        self._started = clock() - age
        self._phase = "starting"
        self._attempt = 0
        self._alive: set[int] | None = None
        self._steps: dict[int, int] = {}
        self._metrics: dict[str, dict[int, float]] = {}
        self._result: RunResult | None = None
        self._colour = _RUNNING
        self.unfinished: Sequence[str] = ()
        """Progress bars, and lines that wait for their end."""

    def show(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Phase():
                self._phase = event.text
            case RanksStarted():
                self._attempt = event.attempt
                self._alive = set(range(len(event.pids)))
                self._colour = _RUNNING
            case RankEnded():
                if self._alive is not None and event.attempt == self._attempt:
                    self._alive.discard(event.rank)
            case Stopping():
                reason = f": {event.reason}" if event.reason else ""
                self._phase = f"stopping ({event.step}){reason}"
                self._colour = _STOPPING
            case Metric():
                if event.step is not None:
                    self._steps[event.rank] = event.step
                for name, value in event.values.items():
                    self._metrics.setdefault(name, {})[event.rank] = value
            case Ended() | Note() | Output():
                pass

    def end(self, result: RunResult) -> None:
        """The run is over: this is what stays in the saved notebook."""
        self._result = result
        self._colour = _ENDED[result.state]
        self.unfinished = ()

    @property
    def running(self) -> bool:
        """Whether `end` is still to come."""
        return self._result is None

    def state(self) -> tuple[str, ...]:
        """What is worth a new line in a terminal: what the run does, and on how many ranks."""
        return (self._state(), *self._ranks())

    def content(self) -> tuple[str, ...]:
        """All that is shown, but the time of day: unchanged, it is not worth an update."""
        return (self._state(), *self._facts(), *self._some_unfinished())

    def text(self) -> str:
        """All in one line, and below it the lines that have no end yet."""
        line = " · ".join([self._state(), *self._facts(), self._place, self._time()])
        return "\n".join([line, *self._some_unfinished()])

    def html(self) -> str:
        """The same, small and without anything that a front end takes away."""
        facts = "".join(f" · {html.escape(fact)}" for fact in self._facts())
        aside = html.escape(f" · {self._place} · {self._time()}")
        lines = html.escape("\n".join(self._some_unfinished()))
        below = f'<pre style="margin:4px 0 0 0;padding:0;white-space:pre-wrap">{lines}</pre>'
        return (
            f'<div style="border-left:3px solid {self._colour};padding:2px 0 2px 8px;margin:2px 0">'
            f"<b>{html.escape(self._state())}</b>{facts}"
            f'<span style="opacity:0.7">{aside}</span>{below if lines else ""}</div>'
        )

    def _state(self) -> str:
        result = self._result
        if result is None:
            return _one_line(self._phase)
        words = _WORDS.get(result.state, result.state)
        if result.state == "failed" and result.failure is not None:
            return _one_line(f"{words}: {result.failure.headline()}")
        return _one_line(f"{words} ({result.reason})" if result.reason else words)

    def _facts(self) -> list[str]:
        elapsed = self._clock() - self._started
        told: list[str] = []
        if self._result is not None:
            elapsed = self._result.duration
            if self._result.collectives:
                told = [communication.in_short(self._result.collectives)]
        return [*self._ranks(), self._device(), span(elapsed), *self._newest(), *told]

    def _ranks(self) -> list[str]:
        size = self._spec.world_size
        all_of_them = f"{size} rank{'s' if size != 1 else ''}"
        if self._result is not None:
            return [all_of_them]
        return [] if self._alive is None else [f"{len(self._alive)} of {all_of_them}"]

    def _device(self) -> str:
        if self._spec.spmd:
            return f"SPMD on {self._spec.counted()}"
        return "TPU" if self._spec.device == "TPU" else "rehearsal on CPU"

    def _newest(self) -> list[str]:
        """The newest step, and of each metric the mean over ranks of their newest values."""
        found = [f"step {max(self._steps.values()):,}"] if self._steps else []
        for name, values in self._metrics.items():
            found.append(f"{name} {sum(values.values()) / len(values):.4g}")
        left_out = len(self._metrics) - MOST_METRICS
        if left_out > 0:
            found[-left_out:] = [f"and {left_out} more"]
        return found

    def _time(self) -> str:
        word = "updated" if self._result is None else "ended"
        return f"{word} {time.strftime('%H:%M:%S', time.localtime(self._wall()))}"

    def _some_unfinished(self) -> list[str]:
        lines = list(self.unfinished[:MOST_UNFINISHED])
        left_out = len(self.unfinished) - len(lines)
        return [*lines, f"… and {left_out} more"] if left_out > 0 else lines


def _one_line(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= LONGEST_STATE else f"{line[: LONGEST_STATE - 1]}…"


def span(seconds: float) -> str:
    """'0 s', '59 s', '1 min 05 s', '2 h 03 min'."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
