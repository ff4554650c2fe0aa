"""What is known of a run now, from its events: as text, and as a card."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tpunb import communication, records
from tpunb.display import bars, card, progress, strip
from tpunb.display.curve import Curve
from tpunb.display.ranks import fold, name_ranks
from tpunb.events import (
    Bar,
    Ended,
    Event,
    Life,
    Metric,
    Note,
    Output,
    Phase,
    RankEnded,
    RanksStarted,
    Stopping,
)
from tpunb.models import Failure, RunResult, RunSpec

MOST_METRICS = 6
MOST_UNFINISHED = 8
LONGEST_STATE = 200

_RUNNING, _STOPPING, _GOOD, _BAD = "#2f81f7", "#bf8700", "#2da44e", "#e5534b"
COLOURS = {
    "succeeded": _GOOD,
    "failed": _BAD,
    "hung": _BAD,
    "timed_out": _BAD,
    "interrupted": _STOPPING,
}
_LONG_AGO = " · long ago? %tpu_attach follows it"
"""No front end brings updates to a page that was opened again."""
_WORDS = {"timed_out": "stopped at the time-out", "interrupted": "stopped"}


class Status:
    """What is known of a run now, built up from its events.

    `place` is its folder, `age` the seconds since it began, `stop` what its button says.
    """

    def __init__(
        self,
        spec: RunSpec,
        place: str,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        age: float = 0.0,
        stop: str = card.STOP,
    ) -> None:
        self._spec = spec
        self._place = place
        self._clock = clock
        self._wall = wall
        self._started = clock() - age
        self._phase = "starting"
        self._stop_word, self._left = stop, ""
        self._attempt = 0
        self._alive: set[int] | None = None
        self._steps: dict[int, int] = {}
        self._metrics: dict[str, dict[int, float]] = {}
        self._reduce: dict[str, str] = {}
        self._curves: dict[str, Curve] = {}
        self._life = Life(())
        self._exits: dict[int, int] = {}
        self._failed: int | None = None
        """The rank that failed first."""
        self._stop: Stopping | None = None
        self._compiling: float | None = None
        """Since when every rank that lives compiles, or waits for those that do."""
        self._bars: Sequence[Bar] = ()
        self._blamed = ""
        """How the rank that failed first did."""
        self._folds = self._links = False
        self._steps_speed, self._samples_speed = progress.Speed(), progress.Speed()
        self._remaining = progress.Remaining()
        self._result: RunResult | None = None
        self._colour = _RUNNING
        self.unfinished: dict[int, list[str]] = {}
        """Of each rank, progress bars and lines that wait for their end."""

    def show(self, event: Event) -> None:
        """Take in an event."""
        match event:
            case Phase():
                self._phase = event.text
            case RanksStarted():
                self._attempt = event.attempt
                self._alive = set(range(len(event.pids)))
                self._colour = _RUNNING
                self._exits, self._failed, self._stop, self._blamed = {}, None, None, ""
            case RankEnded():
                if self._alive is not None and event.attempt == self._attempt:
                    self._alive.discard(event.rank)
                    self._exits[event.rank] = event.exitcode
                    if event.exitcode and self._stop is None and self._failed is None:
                        self._failed = event.rank
            case Stopping():
                self._stop = event
                self._colour = _STOPPING
            case Metric():
                self._take(event)
            case Life():
                self._live(event)
            case Ended() | Note() | Output():
                pass

    def blame(self, failure: Failure | None) -> None:
        """How a rank has failed, after its end was shown. The first is told until the end."""
        if failure is not None and failure.rank == self._failed:
            self._blamed = failure.headline()

    def _take(self, metric: Metric) -> None:
        if metric.step is not None:
            self._steps[metric.rank] = metric.step
        for name, value in metric.values.items():
            newest = self._metrics.setdefault(name, {})
            newest[metric.rank] = value
            if name in metric.reduce:
                self._reduce[name] = metric.reduce[name]
            if metric.rank == min(newest):  # once for all ranks
                self._curves.setdefault(name, Curve()).add(self._reduced(name))

    def _live(self, life: Life) -> None:
        self._life = life
        now = self._clock()
        there = [one for one in life.ranks if one is not None and one.begun]
        busy = [one for one in there if one.compiling]
        if busy and all(one.compiling or one.waiting for one in there):
            self._compiling = now if self._compiling is None else self._compiling
        else:
            self._compiling = None
        self._steps_speed.add(now, max((one.steps for one in there), default=0))
        self._samples_speed.add(now, sum(one.samples for one in there))
        tracked = {rank: one.bars for rank, one in enumerate(life.ranks) if one and one.bars}
        self._bars = progress.folded(tracked)

    def end(self, result: RunResult, *, folds: bool = False, links: bool = False) -> None:
        """The run is over: this is what stays in the saved notebook.

        `folds`: with the traceback of a failure, folded. `links`: a link jumps to its cell.
        """
        self._result = result
        self._folds, self._links = folds, links
        self._colour = COLOURS[result.state]
        self.unfinished = {}

    def leave(self, text: str) -> None:
        """It is followed no more: there is nothing left to interrupt."""
        self._left = text

    @property
    def running(self) -> bool:
        """Whether `end` is still to come."""
        return self._result is None

    def state(self) -> tuple[str, ...]:
        """What is worth a new line in a terminal: what the run does, and on how many ranks."""
        return (self._state(), *self._ranks())

    def content(self) -> tuple[str, ...]:
        """All that is shown, but the time of day: unchanged, it is not worth an update."""
        return (self._state(), *self._facts(), *self._newest(), *self._told(), *self._below())

    def line(self) -> str:
        """The most important in one line, for a terminal."""
        known = [self._state(), *self._facts(), *self._newest(), *self._told()]
        return " · ".join([*known, self._place, self._time()])

    def text(self) -> str:
        """The line, and below it all else that the card shows."""
        why = self._why()
        return "\n".join([self.line(), *self._below(), *([] if why is None else why.lines())])

    def html(self, *, stop: bool = False) -> str:
        """The card; with a button that stops the run if `stop` and it goes on."""
        names = list(self._metrics)[:MOST_METRICS]
        newest = [word for word in self._newest() if word.startswith("step ")]
        left_out = len(self._metrics) - len(names)
        _, lines = self._progress()
        share = self._share()
        return card.Card(
            colour=self._colour,
            state=self._state(),
            facts=[*self._facts(), *newest, *self._told()],
            aside=f"{self._place} · {self._time()}{'' if self._result else _LONG_AGO}",
            stop=self._button() if stop else "",
            share=share,
            progress=self._progress_words(),
            metrics=[card.Metric(n, f"{self._reduced(n):.4g}", self._curves[n]) for n in names],
            more=f"and {left_out} more" if left_out > 0 else "",
            marks=self._marks(),
            speeds=self._speeds(),
            summary=[] if self._result is None else self._result.summary.lines(),
            lines=lines,
            why=self._why(),
        ).html()

    def _button(self) -> str:
        if self._result is not None or self._left:
            return ""
        again = self._stop is not None and self._stop.reason.startswith("interrupted")
        return card.STOP_NOW if again and self._stop_word == card.STOP else self._stop_word

    def _why(self) -> card.Why | None:
        if self._result is None:
            return None
        return card.why(self._result, folds=self._folds, links=self._links)

    def _below(self) -> list[str]:
        curves = [f"{name} {drawn}" for name, curve in self._curves.items()
                  if (drawn := curve.text())][:MOST_METRICS]  # fmt: skip
        marks = self._marks()
        parts = [self._progress_words(), " · ".join(curves), strip.in_words(marks) if marks else "",
                 " · ".join(self._speeds())]  # fmt: skip
        summary = [] if self._result is None else self._result.summary.lines()
        return [*filter(None, parts), *summary, *self._progress()[1]]

    def _state(self) -> str:
        result = self._result
        if result is None:
            return _one_line(self._doing())
        return ended(result)

    def _doing(self) -> str:
        if self._left:
            return self._left
        if self._stop is not None:
            if self._failed is not None and self._stop.reason.startswith("rank"):
                failed = self._blamed or f"rank {self._failed} failed"
                return f"{failed}, stopping the others ({self._stop.step})"
            reason = f": {self._stop.reason}" if self._stop.reason else ""
            return f"stopping ({self._stop.step}){reason}"
        if self._compiling is not None and (took := self._clock() - self._compiling) >= 1:
            busy = sum(one is not None and one.compiling for one in self._life.ranks)
            return f"compiling on {busy} rank{'s' if busy != 1 else ''}, {span(took)}"
        return self._phase

    def _progress(self) -> tuple[Sequence[Bar], list[str]]:
        """The progress of all ranks: what they track, or what their bars say; other lines."""
        read: dict[int, list[Bar]] = {}
        others: dict[int, list[str]] = {}
        for rank, lines in self.unfinished.items():
            for line in lines:
                bar = bars.recognise(line)
                if bar is None or self._bars:
                    others.setdefault(rank, []).append(line)
                else:
                    read.setdefault(rank, []).append(bar)
        found = [f"[{name_ranks(ranks)}] {text}" for text, ranks in fold(others)]
        left_out = len(found) - MOST_UNFINISHED
        if left_out > 0:
            found[-left_out:] = [f"… and {left_out} more"]
        return self._bars or progress.folded(read), found

    def _share(self) -> float | None:
        return None if self._result is not None else progress.fraction(self._progress()[0])

    def _progress_words(self) -> str:
        found, share = self._progress()[0], self._share()
        if self._result is not None or not found:
            return ""
        words = [progress.in_words(found)]
        if share is not None:
            words.append(f"{100 * share:.0f} %")
        left = self._remaining.seconds(self._clock(), share)
        if left is not None and self._stop is None:
            words.append(f"about {span(left)} left")
        return " · ".join(words)

    def _marks(self) -> list[strip.Mark]:
        result = self._result
        if self._spec.world_size == 1:
            return []
        if not any(self._life.ranks) if result is None else result.failure is None:
            return []
        guilty = [self._failed] if self._failed is not None else []
        exits = dict(self._exits)
        if result is not None:
            guilty += [f.rank for f in result.failures[:1] if f.rank is not None]
            exits = {rank: exits.get(rank, -15) for rank in range(self._spec.world_size)}
        speed = self._steps_speed.per_second() or 0.0
        return strip.marks(
            self._spec.world_size, self._life.ranks, exits, guilty, speed,
            hung=result is not None and result.state == "hung",
        )  # fmt: skip

    def _speeds(self) -> list[str]:
        there = [one for one in self._life.ranks if one is not None]
        if not there:
            return []
        found = []
        if self._result is None:
            samples, steps = self._samples_speed.per_second(), self._steps_speed.per_second()
            if samples:
                found.append(f"{samples:,.0f} samples/s")
            if steps:
                each = 1000 / steps
                found.append(f"{each:,.0f} ms a step" if each >= 100 else f"{each:.3g} ms a step")
        most = max(there, key=lambda one: one.compile_seconds)
        if most.compilations:
            graphs = f"{most.compilations} graph{'s' if most.compilations != 1 else ''}"
            found.append(f"compiled {graphs}, {most.compile_seconds:.1f} s")
        held = [one.memory for one in there if one.memory]
        if held and self._result is None:
            share = " a rank" if len(there) > 1 else ""
            found.append(f"memory {max(held) / 1e9:.1f} GB{share}")
        return found

    def _reduced(self, name: str) -> float:
        """Of all ranks."""
        return records.reduced(self._reduce.get(name, records.MEAN), self._metrics[name].values())

    def _facts(self) -> list[str]:
        elapsed = self._clock() - self._started if self._result is None else self._result.duration
        return [*self._ranks(), self._device(), span(elapsed)]

    def _told(self) -> list[str]:
        result, told = self._result, []
        if result is not None and result.collectives:
            told.append(communication.in_short(result.collectives))
        if result is not None and result.price is not None:
            told.append(result.price.tell(result.duration))
        return told

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
        """The newest step, and of each metric the ranks' newest values, reduced."""
        found = [f"step {max(self._steps.values()):,}"] if self._steps else []
        found += [f"{name} {self._reduced(name):.4g}" for name in self._metrics]
        left_out = len(self._metrics) - MOST_METRICS
        if left_out > 0:
            found[-left_out:] = [f"and {left_out} more"]
        return found

    def _time(self) -> str:
        word = "updated" if self._result is None else "ended"
        return f"{word} {time.strftime('%H:%M:%S', time.localtime(self._wall()))}"


def ended(result: RunResult) -> str:
    """How a run ended, in a line."""
    words = _WORDS.get(result.state, result.state)
    if result.state == "failed" and result.failure is not None:
        return _one_line(result.failure.headline())
    return _one_line(f"{words} ({result.reason})" if result.reason else words)


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
