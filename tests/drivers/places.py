"""What tests of every kind of place share: `places.toml`, a shell, the processes of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult


def write_places(folder: Path, **places: Mapping[str, Any]) -> None:
    """Write `places.toml` with a table for each place."""
    lines = []
    for name, table in places.items():
        lines += [f"[places.{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    (folder / "places.toml").write_text("\n".join([*lines, ""]))


def tpunb(folder: Path, env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tpunb", *words],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


def result_of(run: RunDir) -> RunResult:
    """The result of a run that has ended."""
    result = run.read_result()
    assert result is not None
    return result
