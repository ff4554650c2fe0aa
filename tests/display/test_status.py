"""The status of a run as text and HTML, after events."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from tpunb.diagnostics.failure import Diagnosis
from tpunb.display import html
from tpunb.display.html import RankBadge
from tpunb.display.status import LONGEST_STATE, RunStatus
from tpunb.runs.events import (
    Bar,
    Event,
    Metric,
    Phase,
    RankEnded,
    RankSnapshot,
    RankSnapshots,
    RanksStarted,
    Stopping,
)
from tpunb.runs.metrics import Best
from tpunb.runs.result import Advice, Failure, RunResult, Summary
from tpunb.runs.spec import Block, FailureKind, PhaseKind, RunSpec, Stop, StopCause, StopOrigin
from tpunb.utils.text import duration

Make = Callable[..., RunStatus]
MakeResult = Callable[..., RunResult]
MakeSpec = Callable[..., RunSpec]
PLACE = "runs/20260102-030405-digits"


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock, make_spec: MakeSpec) -> Make:
    def build(*events: Event, **changes: Any) -> RunStatus:
        status = RunStatus(make_spec(**changes), PLACE, clock=clock, wall=lambda: 0.0)
        for event in events:
            status.show(event)
        return status

    return build


PRELUDE = [
    Block("prelude", 1, 2, 0, 4),
    Block("prelude", 5, 6, 1, 5, seconds=12.3),
    Block("prelude", 9, 9, 2, 7, seconds=30.0),
]
STARTED = RanksStarted(0, (11, 12, 13, 14))
BY_BUTTON = Stop(StopCause.USER, origin=StopOrigin.NOTEBOOK)
INTERRUPTED = Stopping("SIGINT", "interrupted in the notebook", stop=BY_BUTTON)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "starting · rehearsal on CPU · 0 s"),
        (
            [Phase.of_prelude(PRELUDE, 1)],
            "prelude, cell 2 of 3 [5], about 42 s left · rehearsal on CPU · 0 s",
        ),
        (
            [Phase(PhaseKind.TRAINING, "training"), STARTED],
            "training · 4 of 4 ranks · rehearsal on CPU · 0 s",
        ),
        ([STARTED, RankEnded(0, 2, -9)], "starting · 3 of 4 ranks · rehearsal on CPU · 0 s"),
        (
            [STARTED, INTERRUPTED],
            "stopping (SIGINT): interrupted in the notebook · 4 of 4 ranks · "
            "rehearsal on CPU · 0 s",
        ),
        (
            [Metric(0, 1200, {"loss": 1.23456}), Metric(1, 1199, {"loss": 2.0})],
            "starting · rehearsal on CPU · 0 s · step 1,200 · loss 1.617",
        ),
        (
            [Metric(0, None, {"lr": 1e-7, "acc": 1.0}), Metric(0, None, {"acc": 123456.0})],
            "starting · rehearsal on CPU · 0 s · lr 1e-07 · acc 123456",
        ),
        (
            [Metric(0, 1, {"a": math.inf}), Metric(1, 1, {"a": -math.inf})],
            "starting · rehearsal on CPU · 0 s · step 1 · a nan",
        ),
        (
            [Metric(0, 1, {"n": 3.0}, {"n": "sum"}), Metric(1, 1, {"n": 4.0}, {"n": "sum"})],
            "starting · rehearsal on CPU · 0 s · step 1 · n 7",
        ),
        (
            [Metric(0, 1, dict.fromkeys("abcdefgh", 1.0))],
            "starting · rehearsal on CPU · 0 s · step 1 · "
            "a 1 · b 1 · c 1 · d 1 · e 1 · f 1 · and 2 more",
        ),
    ],
)
def test_the_status_of_an_active_run(make: Make, events: list[Event], expected: str) -> None:
    text = make(*events).line()
    assert re.sub(r"\d\d:\d\d:\d\d$", "T", text) == f"{expected} · {PLACE} · updated T"


def test_the_place_is_named(make: Make, make_result: MakeResult) -> None:
    status = make(STARTED, hosts=("h0", "h1"), place="pod")
    assert status.line().startswith("starting · 4 of 4 ranks on pod · rehearsal on CPU")
    status.end(make_result())
    assert "4 ranks on pod · rehearsal on CPU" in status.html()


def test_the_ranks_of_a_lost_host_are_marked(make: Make, make_result: MakeResult) -> None:
    status = make(STARTED, hosts=("h0", "h1"), place="pod")
    lost = Failure(None, None, None, None, "Lost", "lost", None, None, "", 1.0, host="h1")
    lost = replace(lost, kind=FailureKind.HOST_LOST)
    status.end(make_result("failed", failures=(lost,)))
    assert "ranks h0/0-1 stopped · ranks h1/2-3 lost" in status.text()


def test_many_ranks_of_hosts_with_long_names_are_not_cut() -> None:
    hosts = [f"10.128.0.{number}" for number in range(12, 16)]
    badges = [RankBadge("running")] * 15 + [RankBadge("behind", "9 steps")]
    assert html.describe_badges(badges, hosts) == (
        "ranks 0-14 running · rank 10.128.0.15/15 behind (9 steps)"
    )


@pytest.mark.parametrize("device", ["TPU", "GPU"])
def test_one_rank_on_a_device(device: str, make: Make) -> None:
    status = make(RanksStarted(0, (1,)), world_size=1, device=device)
    assert status.content() == ("starting", "1 of 1 rank", device, "0 s")


def test_state_ignores_changes_of_time_and_numbers(make: Make, clock: Clock) -> None:
    status = make(STARTED)
    state, content = status.state(), status.content()
    status.show(Metric(0, 1, {"loss": 1.0}))
    clock.now += 61
    assert status.state() == state
    assert status.content() != content
    assert "1 min 01 s" in status.content()
    status.show(Phase(PhaseKind.TRAINING, "training"))
    assert status.state() != state


@pytest.mark.parametrize(
    ("state", "changes", "expected"),
    [
        ("succeeded", {}, "succeeded"),
        ("failed", {}, "rank 2 failed in cell [7], line 3: ValueError: no data"),
        ("failed", {"failures": ()}, "failed"),
        ("timed_out", {"reason": "--timeout 5"}, "stopped at the time-out (--timeout 5)"),
        (
            "interrupted",
            {"reason": "interrupted in the notebook"},
            "stopped (interrupted in the notebook)",
        ),
    ],
)
def test_the_status_of_an_ended_run(
    make: Make, make_result: MakeResult, state: str, changes: dict[str, Any], expected: str
) -> None:
    status = make(STARTED, Metric(0, 40, {"loss": 0.5}))
    status.unfinished = {0: ["99%"]}
    status.end(make_result(state, **changes))
    assert status.content() == (
        expected,
        "4 ranks",
        "rehearsal on CPU",
        "12 s",
        "step 40",
        "loss 0.5",
        *(["ranks 0-1,3 stopped · rank 2 failed"] if "rank 2" in expected else []),
    )
    assert " · ended " in status.text()
    assert "99%" not in status.text()
    assert not status.running


def test_summary_and_advice_stay_on_the_card(make: Make, make_result: MakeResult) -> None:
    status = make(STARTED, life(4, 4, compilations=3, compile_seconds=1.0))
    summary = Summary(
        (Best("loss", 0.25, 40), Best("lr", 0.01, 50, last=True)),
        (("prelude", 1.0), ("compiling", 2.04)),
        (Advice("x <is> odd", "do y"),),
    )
    lines = [
        "best loss 0.25 (step 40) · last lr 0.01",
        "time: prelude 1.0 s · compiling 2.0 s",
        "note: x <is> odd → do y",
    ]
    result = make_result(summary=summary)
    status.end(result)
    assert status.text().splitlines()[1:] == ["compiled 3 graphs, 1.0 s", *lines]
    assert "<div>note: x &lt;is&gt; odd → do y</div>" in status.html()
    assert str(result).splitlines()[1:] == lines
    failed = make_result("failed", summary=summary).explain().splitlines()
    assert failed[-len(lines) - 1 : -1] == lines


def test_unfinished_lines_stand_below_and_are_few(make: Make) -> None:
    status = make()
    status.unfinished = {n: [f"{n}%"] for n in range(10)}
    assert status.text().splitlines()[1:] == [*(f"[{n}] {n}%" for n in range(8)), "… and 2 more"]
    assert "[7] 7%\n… and 2 more</pre>" in status.html()


def test_a_long_state_is_cut(make: Make) -> None:
    (state,) = make(Phase(PhaseKind.TRAINING, "x" * 500)).state()
    assert state == "x" * (LONGEST_STATE - 1) + "…"
    clauses = f"rank 0 waited in {'all_reduce ' * 12}: this is its 72nd call{', and more' * 9}"
    (state,) = make(Phase(PhaseKind.TRAINING, clauses)).state()
    assert state.removesuffix(" …").endswith(("call", "more"))
    assert len(state) <= LONGEST_STATE


KEPT = set(
    "background-color border border-left border-radius display flex-wrap font-family font-size "
    "height line-height margin margin-top max-width opacity overflow padding vertical-align "
    "white-space width word-break".split()
)
"""Style properties that JupyterLab and Notebook 7 keep in an untrusted notebook."""


class Reader(HTMLParser):
    """Collects the text, and every tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def life(*steps: int, **changes: Any) -> RankSnapshots:
    return RankSnapshots(tuple(RankSnapshot(begun=True, steps=count, **changes) for count in steps))


FULL = [
    STARTED,
    Phase(PhaseKind.TRAINING, "<b>&training"),
    *(Metric(0, n, {"<i>": float(n)}) for n in range(90)),
    life(
        9,
        9,
        9,
        5,
        compilations=2,
        compile_seconds=1.25,
        memory=10**9,
        bars=(Bar("epoch", 2, 10), Bar("", 5, 20)),
    ),
]


def test_html_has_the_contents_of_the_text_and_only_tags_that_front_ends_keep(make: Make) -> None:
    status = make(*FULL)
    status.unfinished = {0: ["<script>alert(1)</script>"]}
    reader = Reader()
    reader.feed(status.html(stop=True))
    words = {word for line in status.text().splitlines() for word in line.split(" · ")}
    for word in {word for word in words if "<i>" not in word}:
        assert word in reader.text
    assert "<i> 89" in reader.text
    tags = [tag for tag, _ in reader.tags]
    assert set(tags) == {"div", "b", "span", "pre", "img", "button", "style"}
    for _, attributes in reader.tags:
        assert not {name for name in attributes if name.startswith("on")}
        for style in (attributes.get("style") or "").split(";"):
            # The last two hide the line about silence, in trusted notebooks only.
            kept = {"", *KEPT, "max-block-size", "animation"}
            assert style.partition(":")[0] in kept, style
            assert "var(" not in style
            assert not style.startswith("color")
    assert len(status.html()) < 10_000
    assert "<button" not in status.html()


def test_a_card_counts_steps_once(make: Make, make_result: MakeResult) -> None:
    status = make(STARTED, *(Metric(rank, 56, {"loss": 1.0}) for rank in range(4)))
    status.show(life(48, 48, 48, 39))
    assert status.text().count("step 56") == 1
    status.show(life(48, 48, 48, 39, bars=(Bar("epoch", 1, 5), Bar("step", 2, 11))))
    for text in (status.text(), status.html()):
        assert "step 2 of 11" in text
        assert "rank 3 behind (9 steps)" in text
        assert len(re.findall(r"\bstep \d+", text)) == 1
    status.show(life(48, 48, 48, 39, bars=(Bar("epoch", 1, 5),)))
    assert "step 56" in status.text()  # epochs are not steps
    status.end(make_result("succeeded"))
    assert "step 56" in status.text()


def test_no_time_left_is_shown_while_the_first_steps_compile(make: Make, clock: Clock) -> None:
    status = make(STARTED)

    def shown(done: int, steps: int, **changes: Any) -> str:
        clock.now += 5.0
        status.show(life(*[steps] * 4, bars=(Bar("step", done, 100),), **changes))
        return status.card().progress

    assert shown(0, 0) == "step 0 of 100 · 0 %"
    assert shown(0, 0, compiling=True) == "step 0 of 100 · 0 % · compiling"
    assert shown(1, 1, compiling=True) == "step 1 of 100 · 1 % · compiling"
    assert shown(1, 1) == "step 1 of 100 · 1 %"
    assert shown(2, 2, compiling=True) == "step 2 of 100 · 2 % · compiling"
    assert shown(4, 4) == "step 4 of 100 · 4 %"
    assert shown(5, 5) == "step 5 of 100 · 5 % · about 5 min 16 s left"
    assert "left" in shown(6, 6, compiling=True)  # in the evaluation, for example


def test_the_phase_is_described(make: Make, clock: Clock) -> None:
    status = make(*FULL)
    assert status.card().share == pytest.approx(0.225)
    assert status.card().progress == "epoch 3 of 10 · step 5 of 20 · 22 %"
    clock.now += 10
    status.show(life(19, 19, 19, 19, bars=(Bar("epoch", 3, 10), Bar("", 0, 20)), samples=640))
    card = status.card()
    assert card.share == pytest.approx(0.3)
    assert card.progress == "epoch 4 of 10 · step 0 of 20 · 30 % · about 1 min 33 s left"
    assert {"1,000 ms a step", "256 samples/s"} <= set(card.speeds)
    assert {badge.word for badge in card.badges} == {"running"}
    # While the run stops, no time left is shown, and the button has another label.
    assert status.card(stop=True).stop == html.STOP
    status.show(INTERRUPTED)
    assert "left" not in status.card().progress
    assert status.card(stop=True).stop == html.STOP_NOW


def test_the_button_of_a_cell_that_only_follows_a_run(clock: Clock, make_spec: MakeSpec) -> None:
    status = RunStatus(make_spec(), PLACE, clock=clock, stop=html.LEAVE)
    assert status.card(stop=True).stop == html.LEAVE
    status.show(INTERRUPTED)  # in the cell that started the run
    assert status.card(stop=True).stop == html.LEAVE
    status.leave("goes on elsewhere")
    card = status.card(stop=True)
    assert (card.state, card.stop) == ("goes on elsewhere", "")


def test_a_long_compilation_is_shown(make: Make, clock: Clock) -> None:
    status = make(STARTED, Phase(PhaseKind.TRAINING, "training"))
    busy = RankSnapshots(
        (RankSnapshot(begun=True, compiling=True), RankSnapshot(begun=True, waiting=True))
    )
    for _ in range(2):
        status.show(busy)
        clock.now += 12
    assert status.content()[0] == "compiling on 1 rank, 24 s"
    assert status.state()[0] == "compiling on 1 rank"
    status.show(life(1, 1))
    assert status.state()[0] == "training"


def test_a_phase_that_began_before_it_was_seen(make_spec: MakeSpec) -> None:
    status = RunStatus(make_spec(), PLACE, clock=Clock(), wall=lambda: 1_000_007.0)
    status.show(replace(Phase.of_prelude(PRELUDE, 2), time=1_000_000.0))
    assert status.content()[0] == "prelude, cell 3 of 3 [7], about 23 s left"


def test_the_failed_rank_is_shown_while_the_others_are_stopped(make: Make) -> None:
    status = make(
        STARTED,
        RankEnded(0, 2, 1),
        Stopping("SIGINT", "in other words", stop=Stop(StopCause.PEER_FAILED)),
    )
    assert status.state()[0] == "rank 2 failed, stopping the others (SIGINT)"
    failure = Failure(2, 1, 1, None, "ValueError", "no data", 7, 3, "", 1.0)
    status.blame(failure)
    status.blame(replace(failure, rank=1, line=9))
    assert status.state()[0] == (
        "rank 2 failed in cell [7], line 3: ValueError: no data, stopping the others (SIGINT)"
    )


def test_bars_of_libraries_become_the_progress(make: Make) -> None:
    status = make(STARTED)
    bar = "epoch 1:  {0}%|███  | {0}/100 [00:12<00:29,  4.81it/s]"
    status.unfinished = {rank: [bar.format(30 + rank)] for rank in range(4)}
    card = status.card()
    assert (card.share, card.progress) == (0.3, "epoch 1: 30 of 100 · 30 %")
    assert card.lines == []


def test_a_failure_is_shown_with_its_lines_and_what_to_do(
    make: Make, make_result: MakeResult
) -> None:
    status = make(STARTED)
    known = Diagnosis("x", "The batch is <small>.", "Make it larger.", (), 1.0, "https://x")
    source = ((2, "if x:"), (3, "  y(<1>)"))
    failed = make_result("failed", diagnoses=(known,))
    assert failed.failure is not None
    failed = replace(failed, failures=(replace(failed.failure, source=source, cell_id='a"b'),))
    status.end(failed, traceback=True, link=True)
    reader = Reader()
    reader.feed(status.html(stop=True))
    assert "     2  if x:\n❯    3    y(<1>)" in reader.text
    told = reader.text.index("Why: The batch is <small>.Fix: Make it larger.")
    assert told < reader.text.index("tracebackTraceback …")
    tags = [tag for tag, _ in reader.tags]
    assert "button" not in tags
    assert ("a", {"href": '#cell-id=a"b'}) in reader.tags
    assert tags.count("details") == 1
    assert ("details", {}) in reader.tags  # not open
    assert status.text().splitlines()[2:] == [
        "     2  if x:",
        "❯    3    y(<1>)",
        "Why: The batch is <small>.",
        "Fix: Make it larger.",
        "See: https://x",
        "Traceback …",
    ]
    endless = "".join(f"line {n}\n" for n in range(5_000))
    status.end(
        replace(failed, failures=(replace(failed.failure, traceback=endless),)), traceback=True
    )
    assert "line 0\n" in status.html()
    assert "characters left out; all are in run.log" in status.html()
    assert "line 4999</pre>" in status.html()
    assert len(status.html()) < 10_000
    status.end(failed)
    details = status.card().failure
    assert details is not None
    assert (details.traceback, details.link) == ("", False)
    assert "cell-id" not in status.html()


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 s"), (59.9, "59 s"), (60, "1 min 00 s"), (90_061, "25 h 01 min")]
)
def test_duration_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


LONG_HOSTS = tuple(f"gke-tpu-{'a-long-name-' * 4}{n}.c.project.internal" for n in range(64))
LONG = "a <long> text, " * 500


@pytest.mark.parametrize("world_size", [256])
@pytest.mark.parametrize("hosts", [(), LONG_HOSTS[:4], LONG_HOSTS[:32]])
def test_the_card_of_long_names_and_messages_is_small(
    make: Make, make_result: MakeResult, world_size: int, hosts: tuple[str, ...]
) -> None:
    """It is sent again twice a second, so a line without an end must not make it large."""
    ranks = range(world_size)
    status = make(RanksStarted(0, tuple(ranks)), world_size=world_size, hosts=hosts)
    for name in "abcdefgh":
        for step in range(200):
            status.show(Metric(0, step, {f"{name}{LONG}": float(step * 7919 % 997)}))
    status.show(life(*(200 * (rank % 8) for rank in ranks), bars=(Bar(LONG, 2, 10),)))
    status.unfinished = {rank: [f"{rank} {LONG}"] for rank in ranks}
    status.show(Stopping("SIGINT", LONG, stop=BY_BUTTON))
    assert len(status.html(stop=True)) < 12_000
    known = Diagnosis("x", LONG, LONG, (), 1.0, "https://x")
    failed = make_result("failed", world_size=world_size, diagnoses=(known,))
    assert failed.failure is not None
    source = tuple((number, LONG) for number in range(5))
    failure = replace(failed.failure, source=source, traceback=LONG, message=LONG)
    failures = tuple(replace(failure, rank=rank) for rank in ranks)
    status.end(replace(failed, failures=failures), traceback=True, link=True)
    assert len(status.html()) < 20_000  # this one is sent once
