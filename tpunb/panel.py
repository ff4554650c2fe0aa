"""Below the card, where a person can click: the log by rank, searched, and a chart to zoom into.

Widgets of ipywidgets (7.7 and 8). They are made once a front end has answered while the run
goes on, and are gone when it ends: a saved notebook holds neither a widget nor a trace of one.
But a page that is opened again during a run gets no update of any output, and may have been
saved with the panel: what stands in its place then is the run's last card, which the front end
asks the kernel for.
What a person clicks may arrive in another thread, in which nothing can be shown: it is only
noted there, and the thread that follows the run acts on it at its next `tick`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from tpunb import logs
from tpunb.display import chart, comms
from tpunb.display.frontend import FrontEnd, Replaced, Shared, here
from tpunb.display.lines import plain
from tpunb.display.points import Points
from tpunb.display.shown import card_of
from tpunb.display.view import View, short
from tpunb.events import Event, Metric
from tpunb.launcher import Attached, Run
from tpunb.models import RunResult, RunSpec
from tpunb.rundir import RunDir

ASK_AFTER = (0.0, 0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each question to the front end: the first ones may come to nothing, and all that
reach a page which still gets ready for widgets."""
QUESTIONS = len(ASK_AFTER)
LOOK_EVERY = 0.5
LINES = 200
LONGEST = 300
"""Characters of a line."""
MOST_TABS = 16
"""Ranks that have a tab of their own; more are chosen from a list."""
KEPT = 4
"""Runs of which what stands in the panel's place is kept for pages that are opened again."""
_LINES = "margin:0;white-space:pre-wrap;line-height:1.3;flex:none;overflow:visible"
"""How lines stand. Front ends let `pre` scroll by itself, and show its oldest lines then."""
_LEVELS = (("all lines", ""), ("warnings and errors", "warning"), ("errors", "error"))


@contextmanager
def beside(spec: RunSpec, run: RunDir, front: FrontEnd | None = None) -> Iterator[Panel]:
    """A block in which the cell that runs now has the panel of its run, where it can be used."""
    front = front or here()
    can_be = comms.are_heard(front) and _is_there()
    made = Panel(spec, run, questions=QUESTIONS if can_be else 0, fetches=True, keeps=front.stops)
    try:
        yield made
    finally:
        made.end()


def watched(run: Run | Attached, view: View) -> Iterator[None]:
    """Show a run in the cell that runs now until it has ended; pauses at whatever happens."""
    if isinstance(run, Attached) and comms.are_heard(here()):
        importlib.import_module("ipywidgets")  # nothing waits for it, the run goes on by itself
    with beside(run.spec, run.dir) as panel:
        if isinstance(run, Attached) and panel.may_be_shown:
            # What the ranks have written until now comes at once, before the front end answers.
            view.tick()
            panel.hold()
        for event in run.events():
            for shown in (view, panel):
                shown.tick() if event is None else shown.show(event)
            yield


class Aside:
    """The panel of a run in the background: the kernel is free to hear what is clicked.

    A line that says where the log is holds its place, before and afterwards.
    """

    def __init__(self, spec: RunSpec, run: RunDir) -> None:
        """In the thread of a cell."""
        self._output = Shared(f"{run.id}-panel")
        front = here()
        can_be = front.publish is not None and not front.batch and _is_there()
        if can_be:
            self._output(_place(run))
        self.panel = Panel(
            spec, run, questions=QUESTIONS if can_be else 0, keeps=front.stops, output=self._output
        )
        self.show = self._output.show


def _is_there() -> bool:
    # It takes its time to import: %tpu_setup has it done in the background.
    return "ipywidgets" in sys.modules


def _place(run: RunDir) -> dict[str, Any]:
    return {"text/plain": f"log: {short(run.log)} (%tpu_logs searches it)"}


class _Question:
    """Two numbers that the front end is asked to make equal: that takes its whole machinery."""

    def __init__(self) -> None:
        import ipywidgets

        asked, self.answer = ipywidgets.IntText(value=1), ipywidgets.IntText(value=0)
        link = ipywidgets.jsdlink((asked, "value"), (self.answer, "value"))
        self._all = (asked, self.answer, link)
        for widget in self._all:
            comms.let_through(widget)

    def is_answered(self) -> bool:
        return bool(self.answer.value == 1)

    def close(self) -> None:
        _close(self._all)


def _close(widgets: Iterable[Any]) -> None:
    """Take widgets out of kernel and front end, with the parts that each has made for itself."""
    for widget in widgets:
        for part in ("layout", "style"):
            if hasattr(widget, part):
                getattr(widget, part).close()
        widget.close()


class Panel:
    """Asks whether somebody is there, shows itself if so, and goes without a trace."""

    def __init__(
        self,
        spec: RunSpec,
        run: RunDir,
        *,
        questions: int = QUESTIONS,
        fetches: bool = False,
        keeps: bool = False,
        output: Callable[[dict[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`questions`: how often it asks at most whether a front end is there.

        `fetches`: it is ticked by a running cell, which keeps others from hearing what is
        clicked. `keeps`: a page that is opened again asks for what it was saved with.
        `output`: where it stands; below the cell's other outputs, unless given.
        """
        self._spec, self._run, self._clock = spec, run, clock
        self._left = questions
        self._questions: list[_Question] = []
        self._asked = self._looked = -1.0
        self._shown: _Shown | None = None
        self._fetches, self._keeps = fetches, keeps
        self._output = output or Replaced()
        self._points = Points(spec.world_size)

    def show(self, event: Event) -> None:
        """Take in an event; metrics are what the chart is of."""
        if isinstance(event, Metric) and self.may_be_shown:
            self._points.add(event)

    @property
    def may_be_shown(self) -> bool:
        """Whether it is there, or somebody may still answer."""
        return bool(self._left or self._questions or self._shown)

    def hold(self) -> None:
        """Keep its place below what the cell has shown until now, with a line that stays."""
        self._output(_place(self._run))

    def tick(self) -> None:
        """Do what is due. To be called often, in the thread of the cell."""
        now = self._clock()
        if self._fetches and (self._questions or self._shown):
            answers = [question.answer for question in self._questions]
            comms.fetch(answers if self._shown is None else self._shown.asked)
        if self._shown is None:
            self._ask(now)
        elif self._shown.changed or now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._shown.look(self._points)

    def _ask(self, now: float) -> None:
        if any(question.is_answered() for question in self._questions):
            self._close_questions()
            self._shown = _Shown(self._spec, self._run)
            self._output(self._shown.bundle())
        elif self._left and now - self._asked >= ASK_AFTER[-self._left]:
            self._asked = now
            self._left -= 1
            self._questions.append(_Question())

    def _close_questions(self) -> None:
        for question in self._questions:
            question.close()
        self._questions = []

    def end(self) -> None:
        """Take the widgets away. A line that says where the log is stands in their place."""
        self._close_questions()
        if self._shown is not None:
            self._output(_place(self._run))
            self._shown.close(keeps=self._keeps)
            self._shown = None


class _Shown:
    """The widgets."""

    def __init__(self, spec: RunSpec, run: RunDir) -> None:
        import ipywidgets as w

        self._run, self._spec = run, spec
        self._live: logs.Live | None = None
        self._wanted: logs.Search | None = None
        self.changed = True
        self._search = w.Text(
            placeholder="search: a regular expression", continuous_update=False,
            layout=w.Layout(width="320px"),
        )  # fmt: skip
        ranks = range(spec.world_size)
        self._level = w.Dropdown(options=_LEVELS, value="", layout=w.Layout(width="180px"))
        self._rank = w.Dropdown(
            options=[("all ranks", "all"), *((f"rank {n}", str(n)) for n in ranks)],
            value="all", layout=w.Layout(width="120px"),
        )  # fmt: skip
        self._metric = w.Dropdown(options=[], layout=w.Layout(width="240px"))
        self._log_scale = w.Checkbox(description="log scale", indent=False)
        self._zoom = w.FloatRangeSlider(
            value=(0, 100), min=0, max=100, step=1, description="zoom", readout_format=".0f",
            continuous_update=False,
        )  # fmt: skip
        self._log, self._chart = w.HTML(), w.HTML()
        self._own_tabs = 1 < spec.world_size <= MOST_TABS
        controls = [self._search, self._level]
        if spec.world_size > MOST_TABS:
            controls.insert(0, self._rank)
        of_chart = [self._metric, self._log_scale, self._zoom]
        rows = [w.HBox(of, layout=w.Layout(flex_flow="row wrap")) for of in (controls, of_chart)]
        log, drawn = w.VBox([rows[0], self._log]), w.VBox([rows[1], self._chart])
        titles = ["chart", "log"]
        if self._own_tabs:
            titles += [f"rank {rank}" for rank in ranks]
        self._tabs = w.Tab([drawn, *[log] * (len(titles) - 1)], layout=w.Layout(max_width="876px"))
        for index, title in enumerate(titles):
            self._tabs.set_title(index, title)
        self._tabs.selected_index = 1
        self._root, self._last = w.VBox([self._tabs]), w.HTML()
        self.asked = (self._tabs, self._search, self._level, self._rank, self._metric,
                      self._log_scale, self._zoom)  # fmt: skip
        for widget in self.asked:
            comms.let_through(widget)
            widget.observe(self._note, ["value", "selected_index"])
        self._all = [*self.asked, self._log, self._chart, log, drawn, *log.children,
                     *drawn.children]  # fmt: skip

    def _note(self, change: Any) -> None:
        self.changed = True

    def bundle(self) -> dict[str, Any]:
        """What a front end shows the widgets for."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self._root.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": "the log, live"}

    def look(self, points: Points) -> None:
        """Show what has come, in the tab that is open."""
        self.changed = False
        if self._tabs.selected_index:
            self._look_at_log(self._tabs.selected_index)
        else:
            self._draw(points)

    def _look_at_log(self, tab: int) -> None:
        rank = str(tab - 2) if self._own_tabs and tab > 1 else self._rank.value
        text = self._search.value
        try:
            pattern = logs.pattern(text) if text else None
        except argparse.ArgumentTypeError as error:
            self._log.value = f"<i>{escape(str(error))}</i>"
            return
        wanted = logs.Search(ranks=rank, level=self._level.value or None, pattern=pattern)
        if new := self._live is None or wanted != self._wanted:
            self._close_log()
            self._live, self._wanted = logs.Live(self._run, wanted, LINES), wanted
        assert self._live is not None
        if self._live.read() or new:
            lines = "\n".join(plain(line)[:LONGEST] for line in self._live.newest)
            # The newest is at the bottom, and in sight, however often it is replaced.
            style = "display:flex;flex-direction:column-reverse;max-height:300px;overflow:auto"
            text = escape(lines) or "<i>no line yet</i>"
            self._log.value = f'<div style="{style}"><pre style="{_LINES}">{text}</pre></div>'

    def _draw(self, points: Points) -> None:
        if points.names != self._metric.options:
            chosen = self._metric.value
            self._metric.options = points.names
            self._metric.value = chosen if chosen in points.names else points.names[0]
        name = self._metric.value
        if name is None:
            self._chart.value = "<i>tpunb.log(step=…, loss=…) in the train cell draws here</i>"
            return
        drawn = points.of(name)
        first, last = (round(share / 100 * len(drawn)) for share in self._zoom.value)
        self._chart.value = chart.image(drawn[first:last], name, log=self._log_scale.value)

    def _close_log(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def close(self, *, keeps: bool) -> None:
        self._close_log()
        if keeps:
            self._root.children = (self._last,)
            _kept.append((self._run.path, self._last, self._root))
            while len(_kept) > KEPT:
                _close(_kept.popleft()[1:])
        else:
            self._all += [self._root, self._last]
        _close(self._all)


_kept: deque[tuple[Path, Any, Any]] = deque()
"""What stands in the place of panels, by the run's folder, and the box around it."""


def keep(result: RunResult) -> None:
    """Pages that were opened again show how the run has ended, where they would show its panel."""
    for path, last, _ in _kept:
        if path == result.dir:
            last.value = card_of(result)
