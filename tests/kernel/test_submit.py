"""Runs at a place that are started from a terminal."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tpunb.kernel import submit
from tpunb.kernel.launcher import Launcher
from tpunb.runs import directory


def test_ctrl_c_while_a_run_begins_stops_it_and_keeps_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that follows it has begun, and would have nothing to write to."""
    request: Any = MagicMock()
    request.name = "train"
    for name in ("_load", "_options", "cost", "kinds", "replace"):
        monkeypatch.setattr(submit, name, MagicMock())
    monkeypatch.setattr(submit, "_prepare", lambda *given: request)
    monkeypatch.setattr(submit.kept, "kept_snapshot", lambda snapshot: snapshot)
    monkeypatch.setattr(submit, "follow", lambda *given, **options: None)

    def start_at(*given: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return MagicMock()

    monkeypatch.setattr(Launcher, "start_at", start_at)
    submit.submit(
        tmp_path, None, {}, "pod", tmp_path / "runs", detach=False, dry_run=False, yes=True
    )
    [path] = (tmp_path / "runs").iterdir()
    assert '"do": "stop"' in directory.RunDir(path).requests.read_text()
