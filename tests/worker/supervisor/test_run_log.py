from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Output
from tpunb.worker.supervisor.run_log import RunLog


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([(0, "stdout", "a\nb\n")], ["[0] a", "[0] b"]),
        ([(0, "stdout", "a"), (1, "stdout", "x\n"), (0, "stdout", "b\n")], ["[1] x", "[0] ab"]),
        ([(None, "prelude", "p\n"), (3, "prelude", "q\n")], ["[prelude] p", "[3 prelude] q"]),
        ([(0, "stdout", "no end")], ["[0] no end"]),
        ([(0, "stdout", "10%\r20%\r100%\ndone\n")], ["[0] 100%", "[0] done"]),
        ([(0, "stdout", "10%\r2"), (0, "stdout", "0%\r3"), (0, "stdout", "\n")], ["[0] 3"]),
    ],
)
def test_lines(tmp_path: Path, pieces: list[tuple[int | None, str, str]], lines: list[str]) -> None:
    log = RunLog(RunDir(tmp_path))
    log.add([Output(*piece) for piece in pieces])
    log.close()
    assert (tmp_path / "run.log").read_text().splitlines() == lines


@pytest.mark.parametrize("piece", ["x" * 99_999, "loss 0.5\r" * 11_111])
def test_text_without_a_newline_takes_no_more_memory_than_a_long_line(
    tmp_path: Path, piece: str
) -> None:
    log = RunLog(RunDir(tmp_path))
    tracemalloc.start()
    for _ in range(200):
        log.add([Output(0, "stdout", piece)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    log.add([Output(0, "stdout", "y\n")])
    log.close()
    assert peak < 8_000_000
    lines = (tmp_path / "run.log").read_text().splitlines()
    if "\r" in piece:
        assert lines == ["[0] y"]
    else:  # nothing is lost
        assert {len(line) for line in lines[:-1]} == {len("[0] ") + 1_000_000}
        assert "".join(line[4:] for line in lines) == piece * 200 + "y"
