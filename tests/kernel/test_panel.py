"""The panel below the card, in front ends that answer its probes and in others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.runs.test_listing import made
from tpunb.display.front_end import FrontEnd, SharedOutput
from tpunb.kernel import panel
from tpunb.kernel.panel import PROBE_AFTER, PROBES, UPDATE_EVERY, Panel, receives_clicks
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = made(tmp_path, "x", cores=4)
    run.log.write_text("[0] a\n[1] b\n[1 err] ValueError: <b>\n[2] c\n")
    return run


class Watched:
    """A panel with a fake clock and a record of its outputs."""

    def __init__(self, run: RunDir) -> None:
        self.now = 0.0
        self.bundles: list[dict[str, object]] = []
        self.panel = Panel(
            state.read_spec(run),
            run,
            output=self.bundles.append,
            clock=lambda: self.now,
        )

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.panel.tick()

    def answer(self) -> None:
        """Answer the first probe as a front end does."""
        self.wait(0.1)
        self.panel._probes[0].answer.value = 1
        self.wait(0.1)


@pytest.fixture
def watched(run: RunDir) -> Iterator[Watched]:
    watched = Watched(run)
    yield watched
    watched.panel.end()


def test_a_front_end_that_does_not_answer_gets_a_few_probes_and_no_panel(watched: Watched) -> None:
    watched.wait(2)
    assert 4 <= len(watched.panel._probes) < PROBES
    watched.wait(sum(PROBE_AFTER))
    assert len(watched.panel._probes) == PROBES
    watched.panel.end()
    assert watched.bundles == []
    assert watched.panel._probes == []


def test_a_front_end_that_answers_shows_each_ranks_log_with_a_search(watched: Watched) -> None:
    watched.answer()
    [bundle] = watched.bundles
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    shown = watched.panel._widgets
    assert shown is not None
    shown._tabs.selected_index = 1
    watched.wait(0.1)
    assert "[0] a\n[1] b\n[1 err] ValueError: &lt;b&gt;\n[2] c" in shown._log.value
    shown._rank.value = "1"
    watched.wait(0.1)
    assert "[1] b\n[1 err] ValueError: &lt;b&gt;</pre>" in shown._log.value
    shown._level.value = "error"
    watched.wait(0.1)
    assert ">[1 err] ValueError: &lt;b&gt;</pre>" in shown._log.value
    shown._search.value = "nothing"
    watched.wait(0.1)
    assert "no lines yet" in shown._log.value
    shown._search.value = "("
    watched.wait(0.1)
    assert "is not a regular expression" in shown._log.value
    shown._search.value, shown._level.value = "", ""
    with watched.panel._run.log.open("a") as log:
        log.write("[1] later\n")
    watched.wait(UPDATE_EVERY + 0.1)
    assert "[1] later</pre>" in shown._log.value


def test_a_front_end_that_answers_shows_a_chart_of_the_metrics(watched: Watched) -> None:
    watched.answer()
    shown = watched.panel._widgets
    assert shown is not None
    watched.wait(0.1)
    assert "nothing is logged yet" in shown._chart.value
    assert shown._of_chart.layout.display == "none"
    for step in range(10):
        for rank in range(2):
            watched.panel.show(Metric(rank, step, {"loss": 10.0 * step + rank, "lr": 1.0}))
    watched.wait(UPDATE_EVERY + 0.1)
    assert shown._metric.options == ("loss", "lr")
    assert shown._of_chart.layout.display == ""
    assert 'alt="loss from 0.5 to 90.5"' in shown._chart.value
    shown._zoom.value = (50, 80)
    watched.wait(0.1)
    assert 'alt="loss from 50.5 to 70.5"' in shown._chart.value
    before = shown._chart.value
    shown._log_scale.value = True
    watched.wait(0.1)
    assert shown._chart.value != before
    shown._metric.value = "lr"
    watched.wait(0.1)
    assert 'alt="lr from 1 to 1"' in shown._chart.value


def test_a_run_in_the_background_has_a_button_that_stops_it(run: RunDir) -> None:
    bundles: list[object] = []
    opened = panel.background_panel(state.read_spec(run), run, SharedOutput("panel"))
    opened._output, opened._probes_left = bundles.append, PROBES
    opened.tick()
    opened._probes[0].answer.value = 1
    opened.tick()
    assert opened._widgets is not None
    [stop, _] = opened._widgets._root.children
    assert stop.description == "Stop"
    stop.click()
    [request] = map(json.loads, run.requests.read_text().splitlines())
    assert "stopped with its button" in request.values()
    opened.end()


@pytest.mark.parametrize(
    ("ipykernel", "changes", "clicks"),
    [
        ((7, 0), {}, True),
        ((7, 4), {"stops": False}, False),
        ((6, 31), {}, False),
        ((7, 4), {"publish": None}, False),
    ],
)
def test_click_handling_by_ipykernel_version_and_front_end(
    ipykernel: tuple[int, int],
    changes: dict[str, object],
    clicks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(panel, "_VERSION", ipykernel)
    front = FrontEnd(print, print, stops=True)
    assert receives_clicks(replace(front, **changes)) is clicks  # type: ignore[arg-type]


def test_ipykernel_private_name_exists() -> None:
    """The name that sends clicks to the busy thread, in versions of ipykernel that have it."""
    from ipykernel.comm.comm import BaseComm

    installed = tuple(map(int, version("ipykernel").split(".")[:2]))
    assert hasattr(BaseComm, "_reply_subshell_for") == (installed >= (7, 4))
