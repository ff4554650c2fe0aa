"""Marks that ranks leave at their ends, even if they can do nothing else."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from tpunb.worker.rank_marks import RankEnd, RankMarks


def in_fork(act) -> None:
    """Call `action` in a child process, which then ends at once."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.usefixtures("starts_processes")
def test_rank_mark_is_visible_to_the_parent_process() -> None:
    marks = RankMarks(3)
    assert [marks.of(rank).read() for rank in range(3)] == [RankEnd.NONE] * 3
    in_fork(marks.of(1).finish)
    assert [marks.of(rank).read() for rank in range(3)] == [
        RankEnd.NONE,
        RankEnd.FINISHED,
        RankEnd.NONE,
    ]
    assert not marks.any_failed()


def test_first_failure_of_a_rank_is_kept(tmp_path: Path) -> None:
    mark, file = RankMarks(1).of(0), tmp_path / "error.json"
    mark.fail({"type": "First"}, file)
    mark.fail({"type": "Second"}, file)
    mark.finish()
    assert mark.read() is RankEnd.FAILED
    assert json.loads(file.read_text()) == {"type": "First"}


def _no_descriptors() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, most))


def _no_bytes() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("limit", [_no_descriptors, _no_bytes])
@pytest.mark.parametrize("length", [10, 1_000_000])
def test_failure_file_a_rank_cannot_write_is_written_by_the_runner(
    tmp_path: Path, limit, length: int
) -> None:
    marks, file = RankMarks(2), tmp_path / "error.json"
    described = {"type": "OSError", "message": "\u00e9", "traceback": "x" * length}

    def act() -> None:
        limit()
        marks.of(1).fail(described, file)

    in_fork(act)
    assert marks.any_failed()
    assert not file.exists()
    for rank in (0, 1):
        marks.of(rank).save_description(file)
        assert file.exists() == (rank == 1)
    if length > 100:  # too long for its place: the type is kept
        described = {"type": "OSError", "message": "", "traceback": ""}
    assert json.loads(file.read_text()) == described
