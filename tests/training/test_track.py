"""`tpunb.track` in a rank, in the kernel, and under torchrun."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tpunb


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TPUNB_RUN", str(tmp_path))
    monkeypatch.setenv("TPUNB_ATTEMPT", "1")
    monkeypatch.setattr("tpunb.runs.progress.EVERY", 0.0)
    folder = tmp_path / "attempts/1/3"
    folder.mkdir(parents=True)
    return folder / "progress.json"


def test_track_reports_nested_loops_outermost_first(told: Path) -> None:
    import torch

    batches = [(torch.zeros(8, 2), torch.zeros(8))] * 3
    seen: list[dict[str, Any]] = []
    for _ in tpunb.track(range(2), name="epoch"):
        for _ in tpunb.track(batches):
            seen.append(json.loads(told.read_text()))
    assert len(seen) == 6
    assert seen[4] == {
        "bars": [
            {"name": "epoch", "done": 1, "total": 2},
            {"name": "step", "done": 1, "total": 3},
        ],
        "samples": 40,
    }
    assert json.loads(told.read_text())["bars"] == [{"name": "epoch", "done": 2, "total": 2}]


def test_track_forgets_a_loop_left_by_break(told: Path) -> None:
    for _ in tpunb.track(iter("ab"), total=7):
        break
    list(tpunb.track([{"x": 1}]))
    assert json.loads(told.read_text()) == {
        "bars": [{"name": "step", "done": 1, "total": 1}],
        "samples": 0,
    }


TRACKED = "import tpunb; assert list(tpunb.track('abc', name='letter')) == ['a', 'b', 'c']"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(("rank", "shown"), [(None, True), ("0", True), ("1", False)])
def test_track_outside_a_run_shows_tqdm_once(rank: str | None, shown: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "TPUNB_RUN")}
    if rank is not None:
        env["RANK"] = rank
    done = subprocess.run(
        [sys.executable, "-c", TRACKED], env=env, capture_output=True, text=True, check=True
    )
    assert ("letter: 100%" in done.stderr) == shown
    assert done.stdout == ""


def test_outside_a_run_lines_of_log_are_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TPUNB_RUN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    terminal = io.StringIO()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    for step in tpunb.track(range(2)):
        tpunb.log(step, loss=0.5)
    shown = [text.rpartition("\r")[2] for text in terminal.getvalue().split("\n")]
    assert [text for text in shown if "step" in text] == ["step 0 · loss 0.5", "step 1 · loss 0.5"]
