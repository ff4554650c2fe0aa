"""The panel below the card: a chart with zoom, and the log with a filter by rank and a search.

Its ipywidgets (7.7 or 8) are created once a front end has answered during the run, and removed
when the run ends, so a saved notebook contains no widget. But a page that is reopened during a run
gets no update of any output, and may have been saved with the panel: the front end then requests
the panel's widget from the kernel, which shows the run's last card in it.

Clicks may arrive in another thread, which cannot show anything: there they are only noted, and the
thread that follows the run handles them at its next `tick`.

This module is the only one that uses a private name of ipykernel: `BaseComm._reply_subshell_for`.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpunb.display import html
from tpunb.display.chart import chart_html
from tpunb.display.formatters import result_card
from tpunb.display.front_end import (
    NOTHING,
    FrontEnd,
    ReplacedOutput,
    SharedOutput,
    current_front_end,
)
from tpunb.display.run_view import RunView
from tpunb.kernel.launcher import Attached, Run, show_events
from tpunb.runs import logs, state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Event, Metric
from tpunb.runs.metrics import MetricSeries
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState, Stop, StopOrigin
from tpunb.utils.ansi import strip_ansi

PROBE_AFTER = (0.0, 0.5, 0.5, 0.5, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each probe of the front end: a page that is still loading its widget support drops
the first ones."""
PROBES = len(PROBE_AFTER)
UPDATE_EVERY = 0.5
"""Seconds between updates without a click."""
LINES = 200
"""Number of newest log lines that are shown."""
LONGEST = 300
"""Maximum number of characters of each line."""
KEPT = 4
"""Number of runs whose last card is kept, for pages that were saved with their panel."""
_LINES = "margin:0;white-space:pre-wrap;line-height:1.3;flex:none;overflow:visible"
"""Style of the log's lines. Without it, front ends scroll `pre` and show the oldest lines."""
_RANK = re.compile(r"\[(\d+)(?=[ \]])")
_LEVELS = (("all lines", ""), ("warnings and errors", "warning"), ("errors", "error"))


_VERSION = tuple(map(int, version("ipykernel").split(".")[:2]))
_SUBSHELLS = (7, 0)
"""The first ipykernel version that handles widgets' messages while a cell runs."""


def receives_clicks(front: FrontEnd) -> bool:
    """True if clicks in the panel of the running cell reach the kernel before the cell has ended.

    The main thread, which handles widgets' messages, is busy with the cell. From ipykernel 7 on,
    JupyterLab and Notebook 7 send these messages to a subshell, which is another thread. On
    ipykernel 6, and in other front ends, they wait for the cell.
    """
    return front.publish is not None and front.stops and _VERSION >= _SUBSHELLS


def _has_ipywidgets() -> bool:
    # Importing it takes half a second: %tpu_setup does this in the background.
    return "ipywidgets" in sys.modules


def _answer_in_subshell(widget: Any) -> None:
    """Have a widget's messages arrive in the subshell, whichever thread wrote to its comm last.

    ipykernel 7.4 sends them to that thread (`BaseComm._reply_subshell_for`): for widgets created in
    a cell, to the main thread, which is busy. Checked on 7.4, and on 7.0 and 7.3, which have no
    such name and need no change.
    """
    comm = widget.comm
    if hasattr(comm, "_reply_subshell_for"):
        comm._reply_subshell_for = lambda data, default: default


@contextmanager
def open_panel(spec: RunSpec, run: RunDir, output: ReplacedOutput) -> Iterator[Panel]:
    """Context manager: the running cell shows its run's panel, if the front end supports it."""
    front = current_front_end()
    clicks = _has_ipywidgets() and receives_clicks(front)
    panel = Panel(spec, run, clicks=clicks, restores=front.stops, output=output)
    try:
        yield panel
    finally:
        panel.end()


def show_run(run: Run | Attached, view: RunView) -> Iterator[None]:
    """Show a run in the running cell until it has ended; yield after each event or pause."""
    if isinstance(run, Attached) and receives_clicks(current_front_end()):
        with suppress(ImportError):  # the import delays nothing: the run continues
            importlib.import_module("ipywidgets")
    with open_panel(run.spec, run.dir, view.panel_output) as panel:
        view.tick()
        if panel.is_open:
            panel.reserve_place()  # right below the card: lines come before the front end answers
        yield from show_events(run, view, panel)


def background_panel(spec: RunSpec, run: RunDir, output: SharedOutput) -> Panel:
    """Return the panel of a background run, in which the kernel is free to receive clicks.

    Call this in the thread of a cell.
    """
    front = current_front_end()
    # An idle kernel receives clicks from any front end.
    clicks = front.publish is not None and not front.batch and _has_ipywidgets()
    output(NOTHING)
    return Panel(
        spec,
        run,
        clicks=clicks,
        restores=front.stops,
        output=output,
        stop=partial(_press_stop, run),
    )


def _press_stop(run: RunDir) -> None:
    """Request a stop; if the run is already stopping, skip the rest of its grace period."""
    now = state.run_state(run) is RunState.STOPPING
    state.request_stop(
        run, Stop(reason="stopped with its button", origin=StopOrigin.HANDLE, now=now)
    )


class _Probe:
    """Test whether a front end shows widgets: it must make two numbers equal."""

    def __init__(self) -> None:
        import ipywidgets

        asked, self.answer = ipywidgets.IntText(value=1), ipywidgets.IntText(value=0)
        link = ipywidgets.jsdlink((asked, "value"), (self.answer, "value"))
        self._widgets = (asked, self.answer, link)
        for widget in self._widgets:
            _answer_in_subshell(widget)

    def is_answered(self) -> bool:
        return bool(self.answer.value == 1)

    def close(self) -> None:
        _close(self._widgets)


def _close(widgets: Iterable[Any]) -> None:
    """Remove widgets, and the layouts and styles that they have created."""
    for widget in widgets:
        for part in ("layout", "style"):
            if hasattr(widget, part):
                getattr(widget, part).close()
        widget.close()


class Panel:
    """The panel of one run.

    probing --answered--> widgets --end--> nothing
       |
       +--no answer to the last probe, or end--> nothing
    """

    def __init__(
        self,
        spec: RunSpec,
        run: RunDir,
        *,
        clicks: bool = True,
        restores: bool = False,
        output: Callable[[dict[str, Any]], None] | None = None,
        stop: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show nothing yet.

        Args:
            spec: The run's spec.
            run: Its folder.
            clicks: False if the kernel receives no clicks: then nothing is ever shown.
            restores: True if a reopened page requests the widgets that it was saved with.
            output: Shows the panel; by default below the cell's other outputs.
            stop: Called by the Stop button; None: no button (a running cell's card has one).
            clock: Seconds from any origin.
        """
        self._spec, self._run, self._clock = spec, run, clock
        self._probes_left = PROBES if clicks else 0
        self._probes: list[_Probe] = []
        self._probed = self._updated = -1.0
        self._widgets: _Widgets | None = None
        self._restores = restores
        self._output = output or ReplacedOutput()
        self._stop = stop
        self._series = MetricSeries(spec.world_size)

    def show(self, event: Event) -> None:
        """Add the event's metrics to the chart."""
        if isinstance(event, Metric) and event.step is not None and self.is_open:
            self._series.add(event)

    @property
    def is_open(self) -> bool:
        """True if the panel is shown or may still appear."""
        return bool(self._probes_left or self._probes or self._widgets)

    def reserve_place(self) -> None:
        """Show nothing in the panel's place, below the cell's outputs so far."""
        self._output(NOTHING)

    def tick(self) -> None:
        """Probe, open or update the panel, if it is time. Call this often, in the cell's thread."""
        now = self._clock()
        if self._widgets is None:
            self._open(now)
        elif self._widgets.changed or now - self._updated >= UPDATE_EVERY:
            self._updated = now
            self._widgets.update(self._series)

    def _open(self, now: float) -> None:
        if any(probe.is_answered() for probe in self._probes):
            self._close_probes()
            self._widgets = _Widgets(self._spec, self._run, stop=self._stop)
            self._output(self._widgets.bundle())
        elif self._probes_left and now - self._probed >= PROBE_AFTER[-self._probes_left]:
            self._probed = now
            self._probes_left -= 1
            self._probes.append(_Probe())

    def _close_probes(self) -> None:
        for probe in self._probes:
            probe.close()
        self._probes = []

    def end(self) -> None:
        """Remove the widgets."""
        self._close_probes()
        self._probes_left = 0
        if self._widgets is not None:
            self._output(NOTHING)
            self._widgets.close(restores=self._restores)
            self._widgets = None


class _Widgets:
    """The widgets of a panel: a tab with a chart, and one with the log."""

    def __init__(self, spec: RunSpec, run: RunDir, *, stop: Callable[[], object] | None) -> None:
        import ipywidgets as w

        self._spec, self._run = spec, run
        self._live: logs.LiveLog | None = None
        self._search_shown: logs.LogSearch | None = None
        self.changed = True
        self._search = w.Text(
            placeholder="search: a regular expression",
            continuous_update=False,
            layout=w.Layout(width="320px"),
        )
        ranks = range(spec.world_size)
        self._level = w.Dropdown(options=_LEVELS, value="", layout=w.Layout(width="180px"))
        self._rank = w.Dropdown(
            options=[("all ranks", "all"), *((f"rank {spec.name_rank(n)}", str(n)) for n in ranks)],
            value="all",
            layout=w.Layout(width="120px"),
        )
        self._metric = w.Dropdown(options=[], layout=w.Layout(width="240px"))
        self._log_scale = w.Checkbox(description="log scale", indent=False)
        self._zoom = w.FloatRangeSlider(
            value=(0, 100),
            min=0,
            max=100,
            step=1,
            description="zoom",
            readout_format=".0f",
            continuous_update=False,
        )
        self._log, self._chart = w.HTML(), w.HTML()
        of_log = [*[self._rank] * (spec.world_size > 1), self._search, self._level]
        of_chart = [self._metric, self._log_scale, self._zoom]
        rows = [w.HBox(of, layout=w.Layout(flex_flow="row wrap")) for of in (of_log, of_chart)]
        self._of_chart = rows[1]
        self._of_chart.layout.display = "none"  # until there is a metric
        log, drawn = w.VBox([rows[0], self._log]), w.VBox([rows[1], self._chart])
        self._tabs = w.Tab([drawn, log], layout=w.Layout(max_width="876px"))
        for index, title in enumerate(("chart", "log")):
            self._tabs.set_title(index, title)
        self._tabs.selected_index = 0  # the log's lines stand below
        above = []
        if stop is not None:
            button = w.Button(description="Stop", tooltip="with time to save; again: without")
            _answer_in_subshell(button)
            button.on_click(lambda _: stop())
            above.append(button)
        self._root = w.VBox([*above, self._tabs])
        self._root.add_class(html.PANEL)
        self._last = w.HTML()
        inputs = (self._tabs, self._search, self._level, self._rank, *of_chart)
        for widget in inputs:
            _answer_in_subshell(widget)
            widget.observe(self._note, ["value", "selected_index"])
        self._all = [*inputs, self._log, self._chart, log, drawn, *above, *rows]

    def _note(self, change: Any) -> None:
        self.changed = True

    def bundle(self) -> dict[str, Any]:
        """Return the output that a front end replaces by the widgets."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self._root.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": "the log, live"}

    def update(self, series: MetricSeries) -> None:
        """Update the open tab."""
        self.changed = False
        if self._tabs.selected_index:
            self._update_log()
        else:
            self._draw(series)

    def _update_log(self) -> None:
        text = self._search.value
        try:
            pattern = logs.parse_pattern(text) if text else None
        except argparse.ArgumentTypeError as error:
            self._log.value = f"<i>{escape(str(error))}</i>"
            return
        search = logs.LogSearch(
            ranks=self._rank.value, level=self._level.value or None, pattern=pattern
        )
        if new := self._live is None or search != self._search_shown:
            self._close_log()
            self._live, self._search_shown = logs.LiveLog(self._run, search, LINES), search
        assert self._live is not None
        if self._live.read() or new:
            lines = "\n".join(self._named(strip_ansi(line)[:LONGEST]) for line in self._live.newest)
            # column-reverse: the view stays at the newest lines, at the bottom.
            style = "display:flex;flex-direction:column-reverse;max-height:300px;overflow:auto"
            text = escape(lines) or "<i>no lines yet</i>"
            self._log.value = f'<div style="{style}"><pre style="{_LINES}">{text}</pre></div>'

    def _named(self, line: str) -> str:
        """In a run on several hosts, replace a line's rank number by its name on the card."""
        found = _RANK.match(line) if self._spec.hosts else None
        if found is None:
            return line
        return f"[{self._spec.name_rank(int(found[1]))}{line[found.end() :]}"

    def _draw(self, series: MetricSeries) -> None:
        if series.names != self._metric.options:
            chosen = self._metric.value
            self._metric.options = series.names
            self._metric.value = chosen if chosen in series.names else series.names[0]
            self._of_chart.layout.display = ""
        name = self._metric.value
        if name is None:
            self._chart.value = (
                "<i>nothing is logged yet: tpunb.log(step=…, loss=…) draws it here</i>"
            )
            return
        drawn = series.values(name)
        first, last = (round(share / 100 * len(drawn)) for share in self._zoom.value)
        self._chart.value = chart_html(drawn[first:last], name, log=self._log_scale.value)

    def _close_log(self) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def close(self, *, restores: bool) -> None:
        self._close_log()
        if restores:
            self._root.children = (self._last,)
            _kept.append((self._run.path, self._last, self._root))
            while len(_kept) > KEPT:
                _close(_kept.popleft()[1:])
        else:
            self._all += [self._root, self._last]
        _close(self._all)


_kept: deque[tuple[Path, Any, Any]] = deque()
"""For each run: its folder, the widget with its last card, and the box around the widget."""


def show_result(result: RunResult) -> None:
    """Show a run's result on reopened pages, which would otherwise show its panel."""
    for path, last, _ in _kept:
        if path == result.dir:
            last.value = result_card(result)
