"""More of tests/scenarios/test_broken_runs.py, which takes longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.test_broken_runs import (
    FILES,
    age,
    broken_ways,
    folder,
    look_at_everything,
    whole,
)
from tpunb.runs import logs
from tpunb.runs.events import Note


@pytest.mark.parametrize("file", FILES)
def test_broken_run_files_do_not_break_commands(folder: Path, file: str) -> None:
    healthy = whole(folder, "healthy")
    run = whole(folder, "broken")
    path = run.path / file
    good = path.read_bytes()
    for name, damage in broken_ways(run):
        damage(path)
        age(run)
        try:
            look_at_everything(folder, run, healthy)
        except Exception as error:
            raise AssertionError(f"{file}: {name}") from error
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        path.write_bytes(good)


def test_huge_log_and_metrics_files_are_not_read_whole(folder: Path) -> None:
    """The files are sparse: nothing here takes the room or the time of what they seem to hold."""
    healthy = whole(folder, "healthy")
    run = whole(folder, "huge")
    end = b"\n[0] the last line\n"
    for name in ("metrics.jsonl", "run.log", "attempts/0/0/stdout.log", "attempts/0/0/stderr.log"):
        with open(run.path / name, "r+b") as file:
            file.seek(40_000_000_000)
            file.write(end)
    for name in ("result.json", "notebook.json", "env.json", "attempts/0/0/saving.txt"):
        os.truncate(run.path / name, 40_000_000_000)
    age(run)
    assert list(logs.read_lines(run, logs.LogSearch(tail=1))) == ["[0] the last line"]
    assert "were not searched; " in logs.read_for_cell(run, logs.LogSearch(level="error"))
    assert "[0] the last line\n" in logs.read_for_cell(run, logs.LogSearch())
    follower = logs.follow_lines(run, logs.LogSearch(tail=1))
    assert next(follower) == ["[0] the last line"]
    follower.close()
    with pytest.warns(UserWarning, match=f"no best values for {run.id}"):
        first, *_ = look_at_everything(folder, run, healthy)
    assert first == Note(
        f"the first 80 GB of output and 40 GB of metrics are not shown; everything is in {run.path}"
    )
