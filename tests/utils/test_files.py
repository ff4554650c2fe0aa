from __future__ import annotations

import multiprocessing
from itertools import pairwise
from pathlib import Path

from tpunb.utils import files
from tpunb.utils.files import LineTail


def write_lines(path: Path, letter: str) -> None:
    for _ in range(500):
        files.append_text(path, letter * 200 + "\n")


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_lines, args=(path, letter)) for letter in "abc"]
    for writer in writers:
        writer.start()
    tail, seen = LineTail(path), []
    while any(writer.is_alive() for writer in writers):
        seen += tail.read()
    for writer in writers:
        writer.join()
    seen += tail.read()
    tail.close()
    assert sorted(seen) == [letter * 200 for letter in "abc" for _ in range(500)]


def test_behind_half_a_line_a_new_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert files.append_lines(path, b"a\n") == 2
    files.append_text(path, "half of on")  # a full disk
    assert files.append_lines(path, b"b\nc\n") == 4
    assert path.read_bytes() == b"a\nhalf of on\nb\nc\n"


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = LineTail(path)
    assert tail.read() == []
    for text, whole in [("a\nb", ["a"]), ("c", []), ("\n", ["bc"])]:
        files.append_text(path, text)
        assert tail.read() == whole
    tail.close()


def test_of_a_long_file_parts_at_equal_distances_are_read(tmp_path: Path) -> None:
    path = tmp_path / "long"
    lines = [f"line {number:06}" for number in range(10_000)]
    path.write_text("\n".join(lines) + "\n")
    whole = path.stat().st_size
    assert list(files.read_spread(path, whole)) == lines
    some = list(files.read_spread(path, whole // 10, parts=10))
    assert set(some) < set(lines)
    assert some == sorted(set(some))
    assert (some[0], some[-1]) == (lines[0], lines[-1])
    assert len(lines) // 11 <= len(some) <= len(lines) // 9
    begins = [b for a, b in pairwise(some) if int(b[5:]) != int(a[5:]) + 1]
    assert len(begins) == 9
    path.write_text("x" * whole)  # one line
    assert len(list(files.read_spread(path, whole // 10, parts=10))) == 1
