"""Bars of rich in a rank, made by unmodified code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("starts_processes")

BEGIN = """
import json, os, sys
from pathlib import Path
from tpunb.runs import progress as files
from tpunb.worker import rich_progress
files.EVERY = 0.0
rich_progress.follow_rich_bars()
assert "rich" not in sys.modules
file = files.progress_path()
told = lambda: json.loads(file.read_text())["bars"] if file.exists() else None
"""


def run(folder: Path, code: str, rank: str = "1") -> Any:
    """The last line that the code prints in a rank, as JSON."""
    (folder / "attempts/0" / rank).mkdir(parents=True)
    env = {"RANK": rank, "TPUNB_RUN": str(folder), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_rich_nested_tasks_are_reported_outermost_first(tmp_path: Path) -> None:
    code = """
from rich.progress import Progress
seen = []
with Progress() as progress:
    outer = progress.add_task("[bold]epoch[/bold]", total=2)
    inner = progress.add_task("batch", total=3)
    hidden = progress.add_task("hidden", total=3, visible=False)
    for _ in range(2):
        progress.reset(inner)
        for _ in range(3):
            progress.advance(inner)
            seen.append(told())
        progress.update(outer, advance=1)
print()
print(json.dumps([seen[4], told()]))
"""
    during, after = run(tmp_path, code)
    assert during == [
        {"name": "epoch", "done": 1, "total": 2},
        {"name": "batch", "done": 2, "total": 3},
    ]
    assert after == [{"name": "batch", "done": 3, "total": 3}]


@pytest.mark.parametrize("disabled", [True, False])
def test_rich_track_and_disabled_track(tmp_path: Path, disabled: bool) -> None:
    code = f"""
from rich.progress import track
for _ in track(range(4), description="reading", disable={disabled}):
    pass
print()
print(json.dumps(told()))
"""
    expected = None if disabled else [{"name": "reading", "done": 4, "total": 4}]
    assert run(tmp_path, code) == expected
