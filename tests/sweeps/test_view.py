"""What a terminal gets while a sweep goes on."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from tpunb.sweeps.folder import Kind, SweepSpec, Trial, TrialState
from tpunb.sweeps.table import SweepTable
from tpunb.sweeps.view import make_view
from tpunb.utils import ansi

SPEC = SweepSpec(
    "nb.ipynb", Kind.GRID, {"lr": [0.1, 0.2]}, "loss", None, "", "", "code", "packages"
)


def test_the_table_leaves_room_for_the_terminals_echo_and_news_are_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A line that fills the terminal and the ^C behind it would be two lines."""
    ours, theirs = pty.openpty()
    for name, value in {"TERM": "xterm", "COLUMNS": "60", "LINES": "12"}.items():
        monkeypatch.setenv(name, value)
    error = "rank 0 failed in cell [4], line 6: ValueError: too high a learning rate"
    trials = {0: Trial(0, {"lr": 0.1}, TrialState.FAILED, error=error, runs=("/runs/a-run",))}
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        view = make_view(SweepTable(SPEC, {}, 2), ())
        with view:
            view.show(trials)
            view.tell("stopping: it has time to save", trials)
            terminal.flush()
            shown = os.read(ours, 100_000).decode()
            view.finish(trials, stopped=True)
        terminal.flush()
        ended = os.read(ours, 100_000).decode()
        monkeypatch.undo()
    os.close(ours)
    lines = [ansi.strip_ansi(line).strip("\r") for line in shown.split("\n")]
    assert max(len(line) for line in lines if "rank 0" in line) == 58
    assert lines[-1].startswith("stopping: it has time to save")
    assert "stopped; run it again to continue" in ended
