"""Logs of runs, whole or searched, as the magics and the command line show them."""

from __future__ import annotations

import argparse
import fcntl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs.test_listing import made
from tpunb.errors import TpunbError
from tpunb.kernel.options import LogsOptions
from tpunb.runs import logs
from tpunb.runs.directory import RunDir
from tpunb.utils.ansi import strip_ansi
from tpunb.utils.options import add_options, build_options

LINES = """\
[tpunb] rehearsal on CPU
[prelude] reading
[0] Step 1
[1] step 1
[1 err] W1121 20:13:30.123456 12 client.cc:7] slow
[0 err] Traceback (most recent call last):
[1] step 2
[0 err]   File "a.py", line 1, in <module>
[0 err]     int("x")
[0 err] ValueError: no \x1b[31mnumber\x1b[0m
[0 err] after it
[1 prelude] UserWarning: old
[11] ERROR:root:full
[11] no error here"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = made(tmp_path, "x", cores=12)
    run.log.write_text(f"{LINES}\n", encoding="utf-8")
    return run


def search(options: str) -> logs.LogSearch:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, LogsOptions)
    return build_options(LogsOptions, parser.parse_args(options.split())).search()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", range(14)),
        ("--ranks 1", [3, 4, 6, 11]),
        ("--ranks 0,11", [2, 5, 7, 8, 9, 10, 12, 13]),
        ("--level error", [5, 7, 8, 9, 12]),
        ("--level warning", [4, 5, 7, 8, 9, 11, 12]),
        ("--grep step", [2, 3, 6]),
        (r"--grep ^\Step.1$", [2, 3]),  # \S is no capital
        ("--grep number$", [9]),  # without its colours
        (r"--grep \[0", []),  # and without its rank
        ("--grep x*$ --ranks 1", [3, 4, 6, 11]),
        ("--tail 2", [12, 13]),
        ("--grep step.1|full --ranks 0-10", [2, 3]),
    ],
)
def test_log_search_options_select_lines(run: RunDir, options: str, found: list[int]) -> None:
    known = LINES.split("\n")
    assert [known.index(line) for line in logs.read_lines(run, search(options))] == [*found]


@pytest.mark.parametrize("rank", ["12", "0,12"])
def test_log_search_of_a_missing_rank_is_an_error(run: RunDir, rank: str) -> None:
    for read in (logs.read_lines, logs.follow_lines):
        with pytest.raises(TpunbError, match=f"has no rank {rank}: its ranks are 0 to 11"):
            next(read(run, search(f"--ranks {rank}")))


def test_a_log_that_is_empty_not_there_or_not_utf8(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    assert logs.read_for_cell(run, logs.LogSearch()) == f"the log of run {run.id} is empty\n"
    run.log.touch()
    assert logs.read_for_cell(run, logs.LogSearch()) == f"the log of run {run.id} is empty\n"
    run.log.write_bytes(b"[0] \xff\n")
    assert logs.read_for_cell(run, logs.LogSearch()) == "[0] \ufffd\n"
    nothing = f"no matching lines in run {run.id} ({run.log})\n"
    assert logs.read_for_cell(run, search("--ranks 1")) == nothing
    assert logs.read_for_cell(run, search("--tail 0")) == ""


def test_a_cell_shows_the_end_of_a_log_that_is_too_long_for_it(run: RunDir) -> None:
    run.log.write_text("".join(f"[0] {n:06} é\n" for n in range(100_000)), encoding="utf-8")
    text = logs.read_for_cell(run, logs.LogSearch())
    first, *lines = text.splitlines()
    assert first == f"… {100_000 - len(lines):,} lines not shown; all are in {run.log}"
    assert lines == [f"[0] {n:06} é" for n in range(100_000 - len(lines), 100_000)]
    assert logs.MOST - 20 < len("\n".join(lines).encode()) < logs.MOST
    cut = logs.read_for_cell(run, logs.LogSearch(), 1)
    assert cut.startswith("… 99,999 lines not shown")
    run.log.write_text("[0] " + "é" * 900_000 + "end\n", encoding="utf-8")
    text = logs.read_for_cell(run, logs.LogSearch())
    assert text.endswith("éend\n")
    assert logs.MOST - 20 < len(text.encode()) < logs.MOST + 20


def test_the_log_of_a_run_that_goes_on_comes_as_it_grows(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    run.log.write_text("[0] a\n[1] b\n[0] c\n[0] half")
    with open(run.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole, mine = (
            logs.follow_lines(run, search("--tail 2")),
            logs.follow_lines(run, search("--ranks 1")),
        )
        assert next(whole) == ["[1] b", "[0] c"]
        assert next(mine) == ["[1] b"]
        with run.log.open("a") as log:
            log.write(" and half\n[1] d\n")
        assert next(whole) == ["[0] half and half", "[1] d"]
        made_result = made(tmp_path, "y", state="succeeded").result
        made_result.rename(run.result)
    assert list(mine) == [["[1] d"]]
    assert list(whole) == []


PIECES = st.sampled_from(
    [
        *("Traceback (most recent call last):", "Fatal Python error: x", "\x1b[31m", "\x1b[0m"),
        *"ERROR CRITICAL FATAL ValueError my.Exception KeyboardInterrupt E1121 F0000 W1234".split(),
        *"WARN WARNING UserWarning Warnings loss 0.1 [3] | a_b.c error xE1121".split(),
    ]
)
PREFIXES = st.sampled_from(["", "[0] ", "[12 err] ", "[1 prelude] ", "[prelude] ", "[tpunb] "])


@given(PREFIXES, st.lists(PIECES, max_size=4), st.sampled_from(["", " "]))
def test_log_quick_check_passes_every_error_and_warning_line(
    prefix: str, pieces: list[str], between: str
) -> None:
    bare = strip_ansi(between.join(pieces))
    if logs._ERROR.search(bare) or logs._WARNING.search(bare) or logs._BEGINS in bare:
        assert logs._MAY_BE_BAD.search(prefix + between.join(pieces))
