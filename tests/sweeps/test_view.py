"""The lines of a sweep whose output is a file or a pipe."""

from dataclasses import replace

import pytest

from tpunb.sweeps.folder import SweepKind, SweepSpec, Trial, TrialState
from tpunb.sweeps.table import SweepTable
from tpunb.sweeps.view import make_view

SPEC = SweepSpec(
    "nb.ipynb", SweepKind.GRID, {"lr": [0.1, 0.2]}, "loss", None, "", "", "code", "packages"
)


def test_sweep_lines_say_what_begins_and_what_ended(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = Trial(0, {"lr": 0.1}), Trial(1, {"lr": 0.2})
    view = make_view(SweepTable(SPEC, {}, 2), ())
    view.show({0: first, 1: second})
    assert capsys.readouterr().out.splitlines() == ["2 trials: 2 waiting"]
    first = replace(first, state=TrialState.RUNNING)
    for _ in range(2):
        view.show({0: first, 1: second})
    assert capsys.readouterr().out.splitlines() == ["trial 0: lr=0.1 · running"]
    first = replace(first, state=TrialState.COMPLETE, value=0.5)
    view.show({0: first, 1: replace(second, state=TrialState.RUNNING)})
    assert capsys.readouterr().out.splitlines() == [
        "trial 0: lr=0.1 · complete · loss 0.5",
        "trial 1: lr=0.2 · running",
    ]


def test_sweep_lines_count_trials_that_ended_before(capsys: pytest.CaptureFixture[str]) -> None:
    ended = Trial(0, {"lr": 0.1}, TrialState.COMPLETE)
    make_view(SweepTable(SPEC, {}, 2), ()).show({0: ended, 1: Trial(1, {"lr": 0.2})})
    assert capsys.readouterr().out == "2 trials: 1 complete, 1 waiting\n"
