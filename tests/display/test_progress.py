"""Shares, bars that libraries really print, speeds and the time left."""

from __future__ import annotations

import io

import pytest
from tqdm import tqdm

from tpunb.display.progress import (
    Speed,
    TimeLeft,
    describe_bars,
    describe_wait,
    fraction,
    parse_bar,
    slowest_bars,
    strip_times,
)
from tpunb.runs.events import Bar, Phase
from tpunb.runs.spec import PhaseKind


@pytest.mark.parametrize(
    ("bars", "share", "words"),
    [
        ([], None, ""),
        ([Bar("", 5)], None, "step 5"),
        ([Bar("", 1_200, 2_400)], 0.5, "step 1,200 of 2,400"),
        ([Bar("epoch", 2, 10), Bar("", 5, 20)], 0.225, "epoch 3 of 10 · step 5 of 20"),
        ([Bar("epoch", 10, 10)], 1.0, "epoch 10 of 10"),
        ([Bar("epoch", 2, 10), Bar("batch", 5)], 0.2, "epoch 3 of 10 · batch 5"),
        ([Bar("Epoch 1", 61, 200)], 0.305, "Epoch 1: 61 of 200"),
        ([Bar("", 0, 0)], None, "step 0 of 0"),
    ],
)
def test_progress_fraction_and_text_of_bars(
    bars: list[Bar], share: float | None, words: str
) -> None:
    assert fraction(bars) == (None if share is None else pytest.approx(share))
    assert describe_bars(bars) == words


@pytest.mark.parametrize(
    ("expected", "rest", "elapsed", "words"),
    [
        (None, 5.0, 3.0, ""),  # this cell's duration is unknown
        (12.0, None, 3.0, "about 12 s"),
        (0.2, None, 0.1, ""),
        (12.0, 6.0, 3.0, "about 15 s left"),
        (12.0, 6.0, 12.5, "about 6 s left"),
        (12.0, 0.0, 12.5, ""),
        (0.2, 6.0, 3.0, "3 s (took less than 1 s before)"),
        (12.0, 6.0, 31.0, "31 s (took 12 s before)"),
        (12.0, None, 31.0, "31 s (took 12 s before)"),
        (600.0, 0.0, 700.0, ""),
        (600.0, 0.0, 750.0, "12 min 30 s (took 10 min 00 s before)"),
    ],
)
def test_prelude_time_left_text(
    expected: float | None, rest: float | None, elapsed: float, words: str
) -> None:
    phase = Phase(PhaseKind.PRELUDE, "prelude", expected=expected, rest=rest)
    assert describe_wait(phase, elapsed) == words


def test_progress_is_that_of_the_slowest_rank() -> None:
    assert slowest_bars({0: [Bar("", 5, 9)], 1: [Bar("", 4, 9)], 2: [Bar("", 6, 9)]}) == [
        Bar("", 4, 9)
    ]
    assert slowest_bars({}) == ()


def test_speed_is_measured_over_the_last_seconds() -> None:
    speed = Speed()
    assert speed.per_second() is None
    for second in range(100):
        speed.add(float(second), second * 2 if second < 50 else 100 + (second - 50) * 8)
    assert speed.per_second() == pytest.approx(8)
    speed.add(100.0, 3)  # another attempt
    assert speed.per_second() is None
    speed.add(102.0, 13)
    assert speed.per_second() == pytest.approx(5)
    compiling = Speed()
    compiling.add(0.0, 0)
    for step in range(1, 50):
        compiling.add(60 + 0.25 * step, step)
    assert compiling.per_second() == pytest.approx(4)


def test_time_left_is_estimated_from_the_finished_share() -> None:
    left = TimeLeft()
    assert left.seconds(0.0, None) is None
    assert left.seconds(100.0, 0.2) is None  # the run was resumed at this share
    assert left.seconds(110.0, 0.4) == pytest.approx(30)
    assert left.seconds(120.0, 0.1) is None  # it started over


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"total": 200}, Bar("", 60, 200)),
        ({"total": 200, "desc": "Epoch 1"}, Bar("Epoch 1", 60, 200)),
        ({"total": 200, "desc": "a: b"}, Bar("a: b", 60, 200)),
        ({"total": 200, "ascii": True}, Bar("", 60, 200)),
        ({"total": 4_000, "unit_scale": True, "unit": "B"}, Bar("", 60, 4_000)),
    ],
)
def test_bars_of_tqdm_are_parsed(options: dict[str, object], expected: Bar) -> None:
    file = io.StringIO()
    bar = tqdm(initial=0, file=file, ncols=80, mininterval=0, **options)  # type: ignore[call-overload]
    bar.update(60)
    bar.close()
    line = file.getvalue().strip("\n").split("\r")[-1]
    assert parse_bar(line) == expected
    assert strip_times(line).endswith(line.partition("[")[0].rstrip().rpartition(" ")[2])
    assert "[" not in strip_times(line)


def test_bars_of_fastprogress_are_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    from fastprogress.fastprogress import ConsoleProgressBar

    bar = ConsoleProgressBar(range(8), total=8)
    bar.prefix = "Epoch 1/2 :"
    for count in range(4):
        bar.update(count)
    lines = capsys.readouterr().out.split("\r")
    bars = [read for line in lines if (read := parse_bar(line)) is not None]
    assert bars[-1].name == "Epoch 1/2"
    assert bars[-1].total == 8
    assert [bar.done for bar in bars] == sorted({bar.done for bar in bars})
    assert "[" not in strip_times(lines[-1])


@pytest.mark.parametrize("line", ["", "loss 45% of 12/13", "[1/2] 45%", "60it [00:12, 4.8it/s]"])
def test_other_lines_are_not_bars(line: str) -> None:
    assert parse_bar(line) is None
    assert strip_times(line) == line
