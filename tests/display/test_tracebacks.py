"""What ranks write as they fail, apart from what the end of the run shows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tpunb.display.tracebacks import Tracebacks
from tpunb.models import Failure, RunResult
from tpunb.rundir import RunDir, write_json

TEXT = "Traceback (most recent call last):\n  cell [7], line 3\nTraceback: no data\n"


def fail(run: RunDir, rank: int, *, attempt: int = 0, line: int = 3, text: str = TEXT) -> Failure:
    """What a rank leaves behind."""
    path = run.error(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    failure = Failure(rank, 1, 1, None, "ValueError", "no data", 7, line, text, 1.0)
    names = ("type", "message", "cell", "line", "traceback", "time")
    write_json(path, {name: asdict(failure)[name] for name in names})
    return failure


def test_how_its_text_is_split_makes_no_difference(tmp_path_factory: Any) -> None:
    run = RunDir(tmp_path_factory.mktemp("run"))
    fail(run, 1)

    @given(st.lists(st.sampled_from([3, 1, 40, 7]), max_size=30))
    def check(sizes: list[int]) -> None:
        found, rest, seen = Tracebacks(run), f"Trace\nTraceback (m\n{TEXT}at exit\n", ""
        for size in sizes:
            seen += found.without(1, rest[:size])
            rest = rest[size:]
        assert seen + found.without(1, rest) == "Trace\nTraceback (m\nat exit\n"

    check()


def test_before_a_rank_has_failed_its_text_stays(tmp_path: Path) -> None:
    found = Tracebacks(RunDir(tmp_path))
    assert found.without(0, TEXT) == TEXT
    assert found.failure(0) is None


def test_the_end_gives_what_is_not_told_with_the_first_failure(
    tmp_path: Path, make_result: Callable[..., RunResult]
) -> None:
    run = RunDir(tmp_path)
    first, other = fail(run, 0), TEXT.replace("line 3", "line 5")
    fail(run, 1)
    fail(run, 2, line=5, text=other)
    found = Tracebacks(run)
    assert [found.without(rank, TEXT) for rank in (0, 1)] == ["", ""]
    assert found.without(2, other) == ""
    assert list(found.end(make_result("failed", failures=(first,)))) == [(2, other)]


def test_what_began_like_one_and_a_run_that_was_stopped(
    tmp_path: Path, make_result: Callable[..., RunResult]
) -> None:
    run = RunDir(tmp_path)
    fail(run, 0)
    fail(run, 1)
    found = Tracebacks(run)
    assert found.without(0, "x\nTrace") == "x\n"
    assert found.without(1, TEXT) == ""
    assert list(found.end(make_result("interrupted"))) == [(0, "Trace"), (1, TEXT)]


def test_another_attempt_gives_those_of_the_last(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    fail(run, 0)
    again = fail(run, 0, attempt=1, line=5)
    found = Tracebacks(run)
    assert list(found.begin(0)) == []
    assert found.without(0, TEXT) == ""
    assert list(found.begin(1)) == [(0, TEXT)]
    assert found.failure(0) is not None
    assert found.failure(0).line == again.line  # type: ignore[union-attr]
