from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tpunb.runs.events import Bar
from tpunb.runs.progress import ProgressFile


def test_progress_file_is_written_a_few_times_a_second(tmp_path: Path) -> None:
    file = ProgressFile(tmp_path / "progress.json")
    written = []
    for done in range(1000):
        file.write(lambda done=done: written.append(done) or [Bar("step", done, 1000)])
    assert written[0] == 0
    assert len(written) < 1000
    file.write(lambda: [Bar("step", 1000, 1000)], 64, now=True)
    assert json.loads(file.path.read_text()) == {
        "bars": [{"name": "step", "done": 1000, "total": 1000}],
        "samples": 64,
    }


def test_full_disk_does_not_end_training_by_its_progress_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ProgressFile(tmp_path / "progress.json")
    monkeypatch.setattr(os, "replace", full)
    file.write(lambda: [Bar("step", 1, 2)], now=True)
    assert not list(tmp_path.iterdir())  # nor the beginning of another file
    monkeypatch.undo()
    file.write(lambda: [Bar("step", 2, 2)], now=True)
    assert file.path.exists()
