from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.events import Output
from tpunb.rundir import RunDir
from tpunb.worker.runlog import RunLog


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([(0, "stdout", "a\nb\n")], ["[0] a", "[0] b"]),
        ([(0, "stdout", "a"), (1, "stdout", "x\n"), (0, "stdout", "b\n")], ["[1] x", "[0] ab"]),
        ([(2, "stderr", "oh\n")], ["[2 err] oh"]),
        ([(None, "prelude", "p\n"), (3, "prelude", "q\n")], ["[prelude] p", "[3 prelude] q"]),
        ([(0, "stdout", "no end")], ["[0] no end"]),
        ([(0, "stdout", "10%\r20%\r100%\ndone\n")], ["[0] 100%", "[0] done"]),
        ([(0, "stdout", "a\r\nb\r\n")], ["[0] a", "[0] b"]),
        ([(0, "stdout", "\n\n")], ["[0] ", "[0] "]),
    ],
)
def test_lines(tmp_path: Path, pieces: list[tuple[int | None, str, str]], lines: list[str]) -> None:
    log = RunLog(RunDir(tmp_path))
    log.add([Output(*piece) for piece in pieces])
    log.close()
    assert (tmp_path / "run.log").read_text().splitlines() == lines


def test_what_tpunb_says_itself_is_marked(tmp_path: Path) -> None:
    log = RunLog(RunDir(tmp_path))
    log.say("rehearsal on CPU")
    assert (tmp_path / "run.log").read_text() == "[tpunb] rehearsal on CPU\n"
    log.close()
