"""Logs of runs, as the magics and the command line give them."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.test_listings import made
from tpunb import logs
from tpunb.errors import TpunbError


def test_the_log_by_rank_and_from_its_end(tmp_path: Path) -> None:
    run = made(tmp_path, "x", cores=12)
    lines = [
        "[prelude] read",
        "[1] a\x0cb\u2028c",
        "[1 err] oh",
        "[11] e",
        "[1 prelude] p",
        "[0] z",
    ]
    run.log.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert logs.log(run) == run.log.read_text(encoding="utf-8")
    assert logs.log(run, rank=1) == "[1] a\x0cb\u2028c\n[1 err] oh\n[1 prelude] p\n"
    assert logs.log(run, rank=11, tail=5) == "[11] e\n"
    assert logs.log(run, tail=2) == "[1 prelude] p\n[0] z\n"
    assert logs.log(run, tail=0) == ""
    assert logs.log(run, rank=2) == ""
    with pytest.raises(TpunbError, match="has no rank 12: its ranks are 0 to 11"):
        logs.log(run, rank=12)


def test_a_log_that_is_empty_not_there_or_not_utf8(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    assert logs.log(run) == ""
    run.log.touch()
    assert logs.log(run) == ""
    run.log.write_bytes(b"[0] \xff\n")
    assert logs.log(run) == "[0] \ufffd\n"


def test_the_log_of_a_run_that_goes_on_comes_as_it_grows(tmp_path: Path) -> None:
    run = made(tmp_path, "x")
    run.log.write_text("[0] a\n[1] b\n[0] c\n[0] half")
    with open(run.lock) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole, mine = logs.follow(run, tail=2), logs.follow(run, rank=1)
        assert next(whole) == "[1] b\n[0] c\n"
        assert next(mine) == "[1] b\n"
        with run.log.open("a") as log:
            log.write(" and half\n[1] d\n")
        assert next(whole) == "[0] half and half\n[1] d\n"
        made_result = made(tmp_path, "y", state="succeeded").result
        made_result.rename(run.result)
    assert list(mine) == ["[1] d\n"]
    assert list(whole) == []
