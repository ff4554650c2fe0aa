"""Events in, one line of text and of HTML out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from tpunb.display.status import LONGEST_STATE, Status, span
from tpunb.events import Event, Metric, Phase, RankEnded, RanksStarted, Stopping
from tpunb.models import RunResult, RunSpec

PLACE = "runs/20260102-030405-digits"


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock, make_spec: Callable[..., RunSpec]) -> Callable[..., Status]:
    def build(*events: Event, **changes: Any) -> Status:
        status = Status(make_spec(**changes), PLACE, clock=clock, wall=lambda: 0.0)
        for event in events:
            status.show(event)
        return status

    return build


STARTED = RanksStarted(0, (11, 12, 13, 14))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "starting · rehearsal on CPU · 0 s"),
        ([Phase("prelude, cell [3]")], "prelude, cell [3] · rehearsal on CPU · 0 s"),
        ([Phase("training"), STARTED], "training · 4 of 4 ranks · rehearsal on CPU · 0 s"),
        ([STARTED, RankEnded(0, 2, -9)], "starting · 3 of 4 ranks · rehearsal on CPU · 0 s"),
        (
            [STARTED, RankEnded(0, 2, -9), RanksStarted(1, (5, 6, 7, 8)), RankEnded(0, 1, -15)],
            "starting · 4 of 4 ranks · rehearsal on CPU · 0 s",
        ),
        (
            [STARTED, Stopping("SIGINT", "interrupted in the notebook")],
            "stopping (SIGINT): interrupted in the notebook · 4 of 4 ranks · "
            "rehearsal on CPU · 0 s",
        ),
        ([Stopping("SIGKILL", "")], "stopping (SIGKILL) · rehearsal on CPU · 0 s"),
        (
            [Metric(0, 1200, {"loss": 1.23456}), Metric(1, 1199, {"loss": 2.0})],
            "starting · rehearsal on CPU · 0 s · step 1,200 · loss 1.617",
        ),
        (
            [Metric(0, None, {"lr": 1e-7, "acc": 1.0}), Metric(0, None, {"acc": 123456.0})],
            "starting · rehearsal on CPU · 0 s · lr 1e-07 · acc 1.235e+05",
        ),
        (
            [Metric(0, None, {"loss": math.nan}), Metric(1, None, {"loss": 1.0})],
            "starting · rehearsal on CPU · 0 s · loss nan",
        ),
        (
            [Metric(0, 1, {"a": math.inf}), Metric(1, 1, {"a": -math.inf})],
            "starting · rehearsal on CPU · 0 s · step 1 · a nan",
        ),
        (
            [Metric(0, 1, dict.fromkeys("abcdefgh", 1.0))],
            "starting · rehearsal on CPU · 0 s · step 1 · "
            "a 1 · b 1 · c 1 · d 1 · e 1 · f 1 · and 2 more",
        ),
    ],
)
def test_what_is_shown_while_a_run_goes_on(
    make: Callable[..., Status], events: list[Event], expected: str
) -> None:
    text = make(*events).text()
    assert re.sub(r"\d\d:\d\d:\d\d$", "T", text) == f"{expected} · {PLACE} · updated T"


def test_a_tpu_is_called_by_its_name(make: Callable[..., Status]) -> None:
    assert make(device="TPU", world_size=8).content() == ("starting", "TPU", "0 s")


def test_one_rank_is_not_called_ranks(make: Callable[..., Status]) -> None:
    assert make(RanksStarted(0, (1,)), world_size=1).state() == ("starting", "1 of 1 rank")


def test_only_time_and_numbers_leave_the_state_alone(
    make: Callable[..., Status], clock: Clock
) -> None:
    status = make(STARTED)
    state, content = status.state(), status.content()
    status.show(Metric(0, 1, {"loss": 1.0}))
    clock.now += 61
    assert status.state() == state
    assert status.content() != content
    assert "1 min 01 s" in status.content()
    status.show(Phase("training"))
    assert status.state() != state


@pytest.mark.parametrize(
    ("state", "changes", "expected"),
    [
        ("succeeded", {}, "succeeded"),
        ("failed", {}, "failed: rank 2 failed in cell [7], line 3: ValueError: no data"),
        ("failed", {"failures": ()}, "failed"),
        ("timed_out", {"reason": "--timeout 5"}, "stopped at the time-out (--timeout 5)"),
        ("interrupted", {"reason": "interrupted in the notebook"},
         "stopped (interrupted in the notebook)"),
        ("interrupted", {}, "stopped"),
    ],
)  # fmt: skip
def test_what_stays_at_the_end(
    make: Callable[..., Status],
    make_result: Callable[..., RunResult],
    state: str,
    changes: dict[str, Any],
    expected: str,
) -> None:
    status = make(STARTED, Metric(0, 40, {"loss": 0.5}))
    status.unfinished = ["[0] 99%"]
    status.end(make_result(state, **changes))
    assert status.content() == (
        expected, "4 ranks", "rehearsal on CPU", "12 s", "step 40", "loss 0.5"
    )  # fmt: skip
    assert " · ended " in status.text()
    assert "99%" not in status.text()
    assert not status.running


def test_unfinished_lines_stand_below_and_are_few(make: Callable[..., Status]) -> None:
    status = make()
    status.unfinished = [f"[{n}] {n}%" for n in range(10)]
    assert status.text().splitlines()[1:] == [*(f"[{n}] {n}%" for n in range(8)), "… and 2 more"]
    assert "[7] 7%\n… and 2 more</pre>" in status.html()


def test_a_long_state_is_cut(make: Callable[..., Status]) -> None:
    (state,) = make(Phase("x" * 500)).state()
    assert state == "x" * (LONGEST_STATE - 1) + "…"


KEPT = {"border-left", "padding", "margin", "opacity", "white-space"}
"""Of the styles that JupyterLab and Notebook 7 keep in an untrusted notebook."""


class Reader(HTMLParser):
    """The text, and every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_says_what_the_text_says_in_what_every_front_end_keeps(
    make: Callable[..., Status],
) -> None:
    status = make(STARTED, Phase("<b>&training"), Metric(0, 1, {"<i>": 1.0}))
    status.unfinished = ["[0] <script>alert(1)</script>"]
    reader = Reader()
    reader.feed(status.html())
    assert reader.text == status.text().replace("\n", "")
    assert {tag for tag, _ in reader.tags} == {"div", "b", "span", "pre"}
    for _, attributes in reader.tags:
        assert set(attributes) <= {"style"}
        for style in (attributes.get("style") or "").split(";"):
            assert not style or style.partition(":")[0] in KEPT
            assert "var(" not in style
    assert len(status.html()) < 1_000


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (0.9, "0 s"), (59.9, "59 s"), (60, "1 min 00 s"), (3599, "59 min 59 s"),
     (3600, "1 h 00 min"), (90_061, "25 h 01 min")],
)  # fmt: skip
def test_span(seconds: float, words: str) -> None:
    assert span(seconds) == words
