"""The status of a run, built from its events: as a line, as text, and as HTML."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from tpunb.display import progress
from tpunb.display.chart import SMALL, chart_image
from tpunb.display.html import (
    MAX_LINE,
    STOP,
    STOP_NOW,
    Card,
    CardMetric,
    FailureDetails,
    RankBadge,
    Sparkline,
    describe_badges,
    describe_some_chips,
    rank_badges,
    silence_line,
)
from tpunb.runs import metrics
from tpunb.runs.chips import Chip
from tpunb.runs.events import (
    Bar,
    Ended,
    Event,
    Figure,
    Metric,
    Note,
    Output,
    Phase,
    RankEnded,
    RankSnapshots,
    RanksStarted,
    Resumed,
    Stopping,
)
from tpunb.runs.result import STATE_STYLES, Failure, RunResult, count_collectives
from tpunb.runs.spec import (
    FailureKind,
    PhaseKind,
    RunSpec,
    RunState,
    StopCause,
    StopOrigin,
    name_device,
)
from tpunb.utils.terminal import Style, join, paint
from tpunb.utils.text import duration, excerpt, fold, number

MOST_METRICS = 6
MOST_UNFINISHED = 8
LONGEST_STATE = 200

_RUNNING, _STOPPING, _GOOD, _BAD = "#2f81f7", "#bf8700", "#2da44e", "#e5534b"
COLOURS = {
    RunState.SUCCEEDED: _GOOD,
    RunState.FAILED: _BAD,
    RunState.HUNG: _BAD,
    RunState.TIMED_OUT: _BAD,
    RunState.INTERRUPTED: _STOPPING,
}


def colour_of(result: RunResult) -> str:
    """Return the colour of an ended run's card: yellow also if a value could not be returned."""
    return _STOPPING if result.lacks() else COLOURS[result.state]


_SILENT, _SILENT_LATER = 20.0, 90.0
"""Seconds without an update after which a page says so; the second after an hour, from which on
the card may change once a minute only."""
_WORDS = {RunState.TIMED_OUT: "stopped at the time-out", RunState.INTERRUPTED: "stopped"}


class RunStatus:
    """The state of a run, built up from its events.

    `folder`: shown unchanged. `age`: seconds since the run began. `stop`: label of the button.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: str,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        age: float = 0.0,
        stop: str = STOP,
    ) -> None:
        self._spec = spec
        self._folder = folder
        self._clock = clock
        self._wall = wall
        self._started = clock() - age
        self._phase = Phase(PhaseKind.STARTING, "starting")
        self._phase_began = self._started
        self._stop_word, self._left = stop, ""
        self._resumed = ""
        """The run and step from which it continues, once a rank has loaded its checkpoint."""
        self._attempt = 0
        self._alive: set[int] | None = None
        self._steps: dict[int, int] = {}
        self._metrics: dict[str, dict[int, float]] = {}
        self._reduce: dict[str, str] = {}
        self._series = metrics.MetricSeries(spec.world_size, keep=False, clock=clock)
        self._complete: dict[str, float] = {}
        """Values at the newest step that all ranks of the metric have logged, by metric."""
        self._sparklines: dict[str, Sparkline] = {}
        self._life = RankSnapshots(())
        self._exits: dict[int, int] = {}
        self._failed: int | None = None
        """The rank that failed first."""
        self._stop: Stopping | None = None
        self._compiling: float | None = None
        """Time since which every live rank compiles, or waits for a rank that does."""
        self._bars: Sequence[Bar] = ()
        self._blamed = ""
        """The failure of rank `_failed`, in a line."""
        self._has_traceback = self._has_link = False
        self._steps_speed, self._samples_speed = progress.Speed(), progress.Speed()
        self._input_speed = progress.Speed()
        self._time_left = progress.TimeLeft()
        self._result: RunResult | None = None
        self._colour = _RUNNING
        self.earlier: list[str] = []
        """A line for each of the newest runs before it in a loop."""
        self.notes: list[Note] = []
        """Notes on the run as a whole."""
        self.unfinished: dict[int, list[str]] = {}
        """Unfinished lines of each rank, including progress bars."""

    def show(self, event: Event) -> None:
        match event:
            case Phase():
                self._phase = event
                age = self._wall() - event.time if event.time else 0.0
                self._phase_began = self._clock() - max(0.0, age)
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
                self._take_metric(event)
            case RankSnapshots():
                self._take_life(event)
            case Resumed():
                self._resumed = f"resumed from {self._spec.resumed_from}, step {event.step}"
            case Ended() | Note() | Output() | Figure():
                pass

    def blame(self, failure: Failure | None) -> None:
        """Show the failure of an ended rank until the run's end, if the rank failed first."""
        if failure is not None and failure.rank == self._failed:
            self._blamed = failure.headline()

    def _take_metric(self, metric: Metric) -> None:
        if metric.step is not None:
            self._steps[metric.rank] = metric.step
        for name, value in metric.values.items():
            newest = self._metrics.setdefault(name, {})
            newest[metric.rank] = value
            if name in metric.reduce:
                self._reduce[name] = metric.reduce[name]
            self._sparklines.setdefault(name, Sparkline())
        self._take_points(self._series.add(metric))

    def _take_points(self, points: Sequence[metrics.Point]) -> None:
        for point in points:
            self._sparklines[point.name].add(point.value)
            self._complete[point.name] = point.value

    def _take_life(self, life: RankSnapshots) -> None:
        self._life = life
        now = self._clock()
        self._take_points(self._series.settle(now - metrics.SETTLED))
        ranks = [rank for rank in life.ranks if rank is not None and rank.begun]
        busy = [rank for rank in ranks if rank.compiling]
        if busy and all(rank.compiling or rank.waiting for rank in ranks):
            self._compiling = now if self._compiling is None else self._compiling
        else:
            self._compiling = None
        self._steps_speed.add(now, max((rank.steps for rank in ranks), default=0))
        self._samples_speed.add(now, sum(rank.samples for rank in ranks))
        self._input_speed.add(now, max((rank.input_seconds for rank in ranks), default=0.0))
        tracked = {n: rank.bars for n, rank in enumerate(life.ranks) if rank and rank.bars}
        self._bars = progress.slowest_bars(tracked)

    def end(self, result: RunResult, *, traceback: bool = False, link: bool = False) -> None:
        """Show the result, which stays in the saved notebook.

        A failure is shown with the folded `traceback` and a `link` to its cell, if these are True.
        """
        self._take_points(self._series.finish(whole=True))
        self._result = result
        self._has_traceback, self._has_link = traceback, link
        self._colour = colour_of(result)
        self.unfinished = {}

    def leave(self, text: str) -> None:
        """Show `text` as the state of the run, which is no longer followed, and no button."""
        self._left = text

    @property
    def running(self) -> bool:
        """True until `end` is called."""
        return self._result is None

    @property
    def succeeded(self) -> bool:
        """True once the run has succeeded, with nothing to be said about it."""
        result = self._result
        return result is not None and result.state is RunState.SUCCEEDED and not result.remarks()

    def folded(self) -> str:
        """Return the ended run in one line."""
        facts = [self._facts()[-1], *self._newest(), *self._costs(), self._folder]
        return " · ".join([self._state(), *facts])

    def state(self) -> tuple[str, ...]:
        """Return the state and the live ranks: a terminal gets a new line when they change."""
        return (self._state(timed=False), *self._ranks())

    def content(self) -> tuple[str, ...]:
        """Return everything that is shown but the time of day, to detect changes."""
        return (self._state(), *self._facts(), *self._newest(), *self._costs(), *self._below())

    def line(self) -> str:
        """Return the most important facts in one line, for a terminal."""
        state = self._state()
        if self._result is not None:
            style = Style.ODD if self._result.lacks() else STATE_STYLES[self._result.state]
            state = paint(state, style)
        facts = [*self._facts(), *self._newest(), *self._costs()]
        return join(" · ", [state, *facts, self._folder, self._time()])

    def text(self) -> str:
        """Return the line, and below it the other contents of the card."""
        failure = self._failure()
        details = [] if failure is None else failure.lines()
        below = [*self._below(), *details, *self._remarks(), *self._fold()]
        return "\n".join([*self.earlier, self.line(), *below])

    def html(self, *, stop: bool = False) -> str:
        """Return the card as HTML; with `stop`, it has a Stop button while the run is active."""
        return self.card(stop=stop).html()

    def card(self, *, stop: bool = False) -> Card:
        """Return the card, with a Stop button if `stop`."""
        names = list(self._metrics)[:MOST_METRICS]
        left_out = len(self._metrics) - len(names)
        _, lines = self._progress()
        share = self._share()
        return Card(
            colour=self._colour,
            state=self._state(),
            facts=[*self._facts(), *self._step(), *self._costs()],
            aside=f"{self._folder} · {self._time()}",
            silence=self._silence(),
            stop=self._button() if stop else "",
            share=share,
            progress=self._describe_progress(),
            metrics=[
                CardMetric(
                    name,
                    value := number(self._reduced(name)),
                    self._sparklines[name],
                    "" if self._result is None else chart_of(self._result, name, value),
                )
                for name in names
            ],
            more=f"and {left_out} more" if left_out > 0 else "",
            badges=self._badges(),
            hosts=self._spec.hosts,
            speeds=self._speeds(),
            chips=self._chips(),
            summary=[] if self._result is None else self._result.summary.lines(),
            lines=lines,
            failure=self._failure(),
            remarks=self._remarks(),
            fold=self._fold(),
            earlier=self.earlier,
        )

    def _remarks(self) -> list[str]:
        remarks = [] if self._result is None else self._result.remarks()
        return [*remarks, *(note.text for note in self.notes if not note.minor)]

    def _fold(self) -> list[str]:
        """Return the minor notes; none while the run is active, when each update closes a fold."""
        return [note.text for note in self.notes if note.minor and self._result is not None]

    def _button(self) -> str:
        if self._result is not None or self._left:
            return ""
        stop = self._stop.stop if self._stop is not None else None
        pressed = stop is not None and stop.origin is StopOrigin.NOTEBOOK
        return STOP_NOW if pressed and self._stop_word == STOP else self._stop_word

    def _failure(self) -> FailureDetails | None:
        if self._result is None:
            return None
        return FailureDetails.of(self._result, traceback=self._has_traceback, link=self._has_link)

    def _below(self) -> list[str]:
        badges = self._badges()
        parts = [
            self._describe_progress(),
            describe_badges(badges, self._spec.hosts) if badges else "",
            " · ".join(self._speeds()),
            " · ".join(describe_some_chips(self._chips())),
        ]
        summary = [] if self._result is None else self._result.summary.lines()
        return [*filter(None, parts), *summary, *self._progress()[1]]

    def _state(self, *, timed: bool = True) -> str:
        result = self._result
        if result is not None:
            return describe_end(result)
        doing, times = self._doing()
        return _one_line(", ".join(filter(None, [doing, times if timed else ""])))

    def _doing(self) -> tuple[str, str]:
        """Return what the run is doing, and how long this has taken or will take."""
        if self._left:
            return self._left, ""
        if self._stop is not None:
            cause = self._stop.stop.cause if self._stop.stop is not None else None
            if self._failed is not None and cause is StopCause.PEER_FAILED:
                failed = self._blamed or f"rank {self._spec.name_ranks([self._failed])} failed"
                return f"{failed}, stopping the others ({self._stop.step})", ""
            reason = f": {self._stop.reason}" if self._stop.reason else ""
            return f"stopping ({self._stop.step}){reason}", ""
        if self._compiling is not None and (took := self._clock() - self._compiling) >= 1:
            busy = sum(rank is not None and rank.compiling for rank in self._life.ranks)
            return f"compiling on {busy} rank{'s' if busy != 1 else ''}", duration(took)
        elapsed = self._clock() - self._phase_began
        return self._phase.text, progress.describe_wait(self._phase, elapsed)

    def _progress(self) -> tuple[Sequence[Bar], list[str]]:
        """Return the ranks' progress, tracked or parsed, and the other unfinished lines."""
        read: dict[int, list[Bar]] = {}
        others: dict[int, list[str]] = {}
        for rank, lines in self.unfinished.items():
            for line in lines:
                bar = progress.parse_bar(line)
                if bar is None or self._bars:
                    others.setdefault(rank, []).append(line)
                else:
                    read.setdefault(rank, []).append(bar)
        named = (f"[{self._spec.name_ranks(ranks)}] {text}" for text, ranks in fold(others))
        folded = [excerpt(line, MAX_LINE) for line in named]
        left_out = len(folded) - MOST_UNFINISHED
        if left_out > 0:
            folded[-left_out:] = [f"… and {left_out} more"]
        return self._bars or progress.slowest_bars(read), folded

    def _share(self) -> float | None:
        return None if self._result is not None else progress.fraction(self._progress()[0])

    def _describe_progress(self) -> str:
        bars, share = self._progress()[0], self._share()
        if self._result is not None or not bars:
            return ""
        words = [progress.describe_bars(bars)]
        if share is not None:
            words.append(f"{100 * share:.0f} %")
        ranks = [rank for rank in self._life.ranks if rank is not None]
        compiling = any(rank.compiling for rank in ranks)
        steps = max([progress.count_steps(bars), *(rank.steps for rank in ranks)])
        left = self._time_left.seconds(self._clock(), share, steps, compiling=compiling)
        if self._stop is None and (left is not None or compiling):
            words.append("compiling" if left is None else f"about {duration(left)} left")
        return " · ".join(words)

    def _badges(self) -> list[RankBadge]:
        result = self._result
        if self._spec.world_size == 1:
            return []
        if not any(self._life.ranks) if result is None else result.failure is None:
            return []
        failed = [self._failed] if self._failed is not None else []
        exits = dict(self._exits)
        if result is not None:
            failed += [f.rank for f in result.failures[:1] if f.rank is not None]
            exits = {rank: exits.get(rank, -15) for rank in range(self._spec.world_size)}
        speed = self._steps_speed.per_second() or 0.0
        return rank_badges(
            self._spec.world_size,
            self._life.ranks,
            exits,
            failed,
            speed,
            hung=result is not None and result.state == RunState.HUNG,
            lost=() if result is None else self._lost(result),
        )

    def _lost(self, result: RunResult) -> list[int]:
        lost = {each.host for each in result.failures if each.kind is FailureKind.HOST_LOST}
        hosts = [number for number, host in enumerate(self._spec.hosts) if host in lost]
        return [rank for number in hosts for rank in self._spec.ranks_on(number)]

    def _speeds(self) -> list[str]:
        ranks = [rank for rank in self._life.ranks if rank is not None]
        if not ranks:
            return []
        parts = []
        if self._result is None:
            samples, steps = self._samples_speed.per_second(), self._steps_speed.per_second()
            if samples:
                parts.append(f"{samples:,.0f} samples/s")
            if steps:
                each = 1000 / steps
                parts.append(f"{each:,.0f} ms a step" if each >= 100 else f"{each:.3g} ms a step")
            if (waits := self._input_speed.per_second()) is not None and waits >= 0.005:
                parts.append(f"waiting for data {100 * min(waits, 1.0):.0f} %")
        most = max(ranks, key=lambda rank: rank.compile_seconds)
        if most.compilations:
            graphs = f"{most.compilations} graph{'s' if most.compilations != 1 else ''}"
            parts.append(f"compiled {graphs}, {most.compile_seconds:.1f} s")
        memory = max((rank.memory or 0 for rank in ranks), default=0)
        if memory and self._result is None:
            share = " a rank" if len(ranks) > 1 else ""
            parts.append(f"memory {memory / 1e9:.1f} GB{share}")
        return parts

    def _chips(self) -> Sequence[Chip]:
        """Return the chips while the run is active; later they are in the summary."""
        return () if self._result is not None else self._life.chips

    def _reduced(self, name: str) -> float:
        """Return a metric's value at the newest complete step, or over all ranks' newest values."""
        if name in self._complete:
            return self._complete[name]
        return metrics.reduce_ranks(
            self._reduce.get(name, metrics.MEAN), self._metrics[name].values()
        )

    def _facts(self) -> list[str]:
        elapsed = self._clock() - self._started if self._result is None else self._result.duration
        resumed = [self._resumed] if self._resumed else []
        return [*self._ranks(), self._device(), duration(elapsed), *resumed]

    def _costs(self) -> list[str]:
        """Return the traffic of collectives and the run's cost, once the run has ended."""
        result, costs = self._result, []
        if result is not None and result.collectives:
            costs.append(count_collectives(result.collectives))
        if result is not None and result.price is not None:
            costs.append(result.price.describe_cost(result.duration))
        return costs

    def _ranks(self) -> list[str]:
        size = self._spec.world_size
        count = f"{size} rank{'s' if size != 1 else ''}"
        where = f" on {self._spec.place}" if self._spec.place else ""
        if self._result is not None:
            return [f"{count}{where}"]
        return [] if self._alive is None else [f"{len(self._alive)} of {count}{where}"]

    def _device(self) -> str:
        if self._spec.spmd:
            return f"SPMD on {self._spec.cores()}"
        return name_device(self._spec.device)

    def _newest(self) -> list[str]:
        """Return the newest step, and each metric's newest value."""
        values = [f"{name} {number(self._reduced(name))}" for name in self._metrics]
        left_out = len(self._metrics) - MOST_METRICS
        if left_out > 0:
            values[-left_out:] = [f"and {left_out} more"]
        return [*self._step(), *values]

    def _step(self) -> list[str]:
        """Return the newest logged step, unless a progress bar already counts steps."""
        bars = self._progress()[0] if self._result is None else ()
        if not self._steps or any(bar.name.lower() in ("", "step", "steps") for bar in bars):
            return []
        return [f"step {max(self._steps.values()):,}"]

    def _silence(self) -> str:
        if self._result is not None or self._left:
            return ""
        early = self._clock() - self._started < 3500
        return silence_line(_SILENT if early else _SILENT_LATER)

    def _time(self) -> str:
        word = "updated" if self._result is None else "ended"
        return f"{word} {time.strftime('%H:%M:%S', time.localtime(self._wall()))}"


def chart_of(result: RunResult, name: str, value: str) -> str:
    """Return the chart of a metric for the card of an ended run; '' for a constant metric.

    `value`: the last one, for its title.
    """
    points = result.summary.curves.get(name, ())
    constant = all(math.isclose(y, points[0][1]) for _, y in points)
    return "" if constant else chart_image(points, f"{name} {value}", SMALL)


def describe_end(result: RunResult) -> str:
    """Describe the end of a run in one line."""
    words = _WORDS.get(result.state, result.state)
    if result.state == RunState.FAILED and result.failure is not None:
        return _one_line(result.failure.headline())
    reason = f" ({result.reason})" if result.reason else ""
    return _one_line(f"{words}{reason}{result.lacks()}")


def _one_line(text: str) -> str:
    line = text.partition("\n")[0]
    if len(line) <= LONGEST_STATE:
        return line
    cut = line[: LONGEST_STATE - 1]
    half = LONGEST_STATE // 2
    places = (max(cut.rfind(mark) for mark in (": ", "; ", ", ")), cut.rfind(" "))
    end = next((place for place in places if place > half), None)
    return f"{cut}…" if end is None else f"{cut[:end]} …"
