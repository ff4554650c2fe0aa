"""The ranks' output in the cell: folded lines, without last tracebacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpunb.display.log_view import LAST_LINES, PATIENCE, LogView, TracebackFilter
from tpunb.display.output_budget import OutputBudget
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Failure, RunResult
from tpunb.utils.files import write_json

MakeResult = Callable[..., RunResult]


class Shown:
    """A log view of four ranks, with a fake clock and a record of the writes."""

    def __init__(self, logs: frozenset[int] = frozenset(range(4)), room: int | None = None) -> None:
        self.now = 100.0
        self.writes: list[tuple[float, str]] = []
        self.stream = LogView(logs, OutputBudget(self._write, room=room))

    def _write(self, text: str) -> None:
        self.writes.append((self.now, text))

    def feed(self, rank: int | None, text: str, stream: str = "stdout") -> None:
        self.stream.feed(rank, stream, text, self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass; the launcher's loop runs every 0.05 s."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.stream.flush(self.now)

    def finish(self, failure: Failure | None = None) -> None:
        self.stream.finish(self.now, failure)

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.writes)

    def check_pace(self, messages: int = 10) -> None:
        """Check that no second has more than `messages` messages."""
        for start, _ in self.writes:
            within = [text for time, text in self.writes if start <= time < start + 1]
            assert len(within) <= messages


def failed(rank: int | None, traceback: str = "") -> Failure:
    return Failure(rank, 1, -11, "SIGSEGV", "Signal", "was killed", None, None, traceback, 0.0)


CONNECTED = "is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
DEBUGGER = "0.00s - Debugger warning: It seems that frozen modules are being used, which may"


def test_log_lines_of_the_program_are_prefixed_with_their_ranks() -> None:
    shown = Shown()
    for rank in range(4):
        shown.feed(rank, f"[Gloo] Rank {rank} {CONNECTED}\n{DEBUGGER}\n")
        shown.feed(rank, f"hello\nI am {rank}\ndone\n")
    shown.wait(0.1)
    assert shown.text == (
        "[0-3] hello\n[0] I am 0\n[1] I am 1\n[2] I am 2\n[3] I am 3\n[0-3] done\n"
    )


def test_lines_that_come_a_moment_apart_fold() -> None:
    shown = Shown()
    shown.feed(0, "epoch 1\n")
    shown.stream.flush(shown.now)
    shown.now += 0.04
    shown.feed(1, "epoch 1\n", "stderr")
    shown.stream.flush(shown.now)
    shown.wait(0.1)
    assert shown.writes[0][1] == "[0-1] epoch 1\n"


def test_lines_that_all_ranks_have_written_do_not_wait() -> None:
    shown = Shown()
    shown.stream.note("the prelude was kept", shown.now)
    shown.wait(0.1)
    for rank in range(4):
        shown.feed(rank, "epoch 1\n")
        shown.stream.flush(shown.now)
        assert len(shown.writes) == (1 if rank < 3 else 2)
    assert shown.text == "the prelude was kept\n[0-3] epoch 1\n"
    assert shown.writes[-1][0] == shown.now


def test_notes_are_printed_without_a_rank_prefix() -> None:
    shown = Shown(logs=frozenset())
    shown.feed(0, "unseen\n")
    shown.stream.note("every rank runs the prelude itself: cell [3]", shown.now)
    shown.wait(0.1)
    assert shown.text == "every rank runs the prelude itself: cell [3]\n"


def test_only_the_ranks_that_were_asked_for_are_shown() -> None:
    shown = Shown(logs=frozenset({1}))
    for rank in range(4):
        shown.feed(rank, f"out {rank}\n")
        shown.feed(rank, f"err {rank}\n", "stderr")
    shown.feed(None, "prelude\n", "prelude")
    shown.feed(1, "prelude of 1\n", "prelude")
    shown.wait(1)
    shown.finish()
    assert shown.text == "[1] out 1\n[1] err 1\n"


def test_an_unfinished_line_comes_at_the_end() -> None:
    shown = Shown()
    shown.feed(0, "working … ")
    shown.wait(3)
    assert shown.text == ""
    shown.feed(0, "done")
    shown.finish()
    assert shown.text == "[0] working … done\n"


def test_unfinished_lines_are_known_once_they_stand_for_a_while() -> None:
    shown = Shown()
    shown.feed(0, "working …")
    assert shown.stream.unfinished(shown.now) == {}
    shown.now += PATIENCE
    assert shown.stream.unfinished(shown.now) == {0: ["working …"]}
    shown.feed(0, " done\nand")
    assert shown.stream.unfinished(shown.now) == {}


def test_a_bar_is_known_at_once_and_becomes_one_line() -> None:
    shown = Shown(logs=frozenset({0, 1, 2}))
    for percent in range(0, 100, 10):
        for rank in range(4):
            shown.feed(rank, f"\r\x1b[32m{percent}%\x1b[0m", "stderr")
        shown.wait(0.1)
        assert shown.stream.unfinished(shown.now) == {rank: [f"{percent}%"] for rank in range(3)}
    for rank in range(4):
        shown.feed(rank, "\r100%\n", "stderr")
    shown.wait(1)
    assert shown.stream.unfinished(shown.now) == {}
    assert shown.text == "[0-2] 100%\n"


def test_bars_that_differ_in_their_times_become_one_line() -> None:
    shown = Shown()
    for rank in range(4):
        bar = f"\repoch 1:  30%|███       | 60/200 [00:12<00:29,  4.8{rank}it/s]"
        shown.feed(rank, bar, "stderr")
    shown.finish()
    assert shown.text == "[0-3] epoch 1:  30%|███       | 60/200\n"


def test_a_slow_rank_is_shown_at_once_and_fast_ones_at_most_ten_times_a_second() -> None:
    shown = Shown()
    for number in range(200):
        shown.feed(0, f"step {number}\n")
        shown.wait(0.05)
    shown.wait(0.25)
    shown.check_pace(messages=10)
    assert len(shown.writes) > 40
    assert shown.text == "".join(f"[0] step {number}\n" for number in range(200))


def test_a_flood_of_all_ranks_is_whole_and_folded_where_output_has_no_limit() -> None:
    shown = Shown()
    lines = [f"{n:05} {'x' * 80}" for n in range(20_000)]
    for start in range(0, 20_000, 1000):
        for rank in range(4):
            shown.feed(rank, "".join(f"{line}\n" for line in lines[start : start + 1000]))
        shown.wait(0.05)
    shown.wait(1)
    shown.check_pace()
    assert shown.text == "".join(f"[0-3] {line}\n" for line in lines)


@pytest.mark.parametrize("logs", [frozenset[int](), frozenset({0})])
def test_the_last_lines_of_a_failed_rank_are_shown_even_if_the_rank_is_not(
    logs: frozenset[int],
) -> None:
    shown = Shown(logs=logs)
    shown.feed(2, "stdout\n")
    shown.feed(2, "".join(f"error {n}\n" for n in range(50)) + "no end", "stderr")
    shown.feed(3, "another\n", "stderr")
    shown.wait(1)
    shown.finish(failed(2))
    expected = [f"[2] error {n}" for n in range(51 - LAST_LINES, 50)] + ["[2] no end"]
    assert shown.text.splitlines() == ["last lines of rank 2 on stderr:", *expected]


def test_last_lines_that_were_shown_are_not_repeated() -> None:
    shown = Shown()
    shown.feed(2, "the cause\n", "stderr")
    shown.wait(1)
    shown.finish(failed(2))
    assert shown.text == "[2] the cause\n"


@pytest.mark.parametrize("rank", [None, 2])
def test_a_crashed_prelude_has_last_lines_and_a_failed_one_a_traceback(rank: int | None) -> None:
    for traceback, expected in [
        ("", "last lines of the prelude:\nFatal Python error\n"),
        ("ValueError", ""),
    ]:
        shown = Shown()
        shown.feed(rank, "Fatal Python error\n", "prelude")
        shown.wait(1)
        shown.finish(failed(rank, traceback))
        assert shown.text == expected


def test_text_is_cut_in_bulk_without_looking_at_every_line() -> None:
    shown = Shown(room=100)
    shown.feed(1, "begun ")
    shown.feed(1, "x\n" + "y" * 99 + "\n" + "z\n" * 2_000_000)
    shown.wait(0.1)
    assert shown.text == "[1] begun x\n"
    assert shown.stream.count == 2_000_002


TRACEBACK = "Traceback (most recent call last):\n  cell [7], line 3\nTraceback: no data\n"


def fail(
    run: RunDir, rank: int, *, attempt: int = 0, line: int = 3, text: str = TRACEBACK
) -> Failure:
    """Write the files that a failed rank leaves."""
    path = run.error(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    failure = Failure(rank, 1, 1, None, "ValueError", "no data", 7, line, text, 1.0)
    names = ("type", "message", "cell", "line", "traceback", "time")
    write_json(path, {name: asdict(failure)[name] for name in names})
    return failure


def test_traceback_filter_does_not_depend_on_how_text_is_split(tmp_path_factory: Any) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    fail(run, 1)

    @given(st.lists(st.sampled_from([3, 1, 40, 7]), max_size=30))
    def check(sizes: list[int]) -> None:
        tracebacks, rest, seen = (
            TracebackFilter(run),
            f"Trace\nTraceback (m\n{TRACEBACK}at exit\n",
            "",
        )
        for size in sizes:
            seen += tracebacks.remove(1, rest[:size])
            rest = rest[size:]
        assert seen + tracebacks.remove(1, rest) == "Trace\nTraceback (m\nat exit\n"

    check()


def test_traceback_filter_keeps_text_of_a_rank_that_has_not_failed(tmp_path: Path) -> None:
    tracebacks = TracebackFilter(RunDir(tmp_path))
    assert tracebacks.remove(0, TRACEBACK) == TRACEBACK
    assert tracebacks.failure(0) is None


def test_the_end_shows_the_tracebacks_other_than_the_first_failure(
    tmp_path: Path, make_result: MakeResult
) -> None:
    run = RunDir(tmp_path)
    first, other = fail(run, 0), TRACEBACK.replace("line 3", "line 5")
    fail(run, 1)
    fail(run, 2, line=5, text=other)
    tracebacks = TracebackFilter(run)
    assert [tracebacks.remove(rank, TRACEBACK) for rank in (0, 1)] == ["", ""]
    assert tracebacks.remove(2, other) == ""
    assert list(tracebacks.end(make_result("failed", failures=(first,)))) == [(2, other)]


def test_traceback_filter_returns_held_text_at_the_end_of_a_stopped_run(
    tmp_path: Path, make_result: MakeResult
) -> None:
    run = RunDir(tmp_path)
    fail(run, 0)
    fail(run, 1)
    tracebacks = TracebackFilter(run)
    assert tracebacks.remove(0, "x\nTrace") == "x\n"
    assert tracebacks.remove(1, TRACEBACK) == ""
    assert list(tracebacks.end(make_result("interrupted"))) == [(0, "Trace"), (1, TRACEBACK)]


def test_traceback_filter_returns_tracebacks_when_a_retry_begins(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    fail(run, 0)
    again = fail(run, 0, attempt=1, line=5)
    tracebacks = TracebackFilter(run)
    assert list(tracebacks.begin(0)) == []
    assert tracebacks.remove(0, TRACEBACK) == ""
    assert list(tracebacks.begin(1)) == [(0, TRACEBACK)]
    assert tracebacks.failure(0) is not None
    assert tracebacks.failure(0).line == again.line  # type: ignore[union-attr]
