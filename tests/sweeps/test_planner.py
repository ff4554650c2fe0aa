"""Optuna's ask and tell, with a journal that survives everything."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from tpunb.errors import MissingPackageError
from tpunb.sweeps.folder import SweepDir, SweepKind, SweepSpec, Trial, TrialState
from tpunb.sweeps.planner import OptunaPlanner, open_journal
from tpunb.sweeps.space import Choice, Range

SPACE = {"lr": Range(1e-5, 1e-1, True), "depth": Range(1, 8), "name": Choice(("a", "b"))}
SPEC = SweepSpec("nb.ipynb", SweepKind.SEARCH, {}, "accuracy", None, "", "", "code", "packages")


@pytest.fixture
def folder(tmp_path: Path) -> SweepDir:
    made = SweepDir(tmp_path / "sweep")
    made.trials.mkdir(parents=True)
    return made


def search(folder: SweepDir, total: int = 20) -> OptunaPlanner:
    return OptunaPlanner(folder, SPEC, SPACE, total)


def run(planner: OptunaPlanner, known: dict[int, Trial], count: int) -> None:
    for _ in range(count):
        trial = planner.propose(known)
        assert trial is not None
        depth = trial.parameters["depth"]
        done = replace(trial, state=TrialState.COMPLETE, value=float(depth))
        planner.tell(done)
        known[trial.number] = done


def test_search_proposes_and_records_trials_until_the_end(folder: SweepDir) -> None:
    known: dict[int, Trial] = {}
    planner = search(folder, 20)
    run(planner, known, 20)
    assert planner.propose(known) is None
    assert planner.study.best_value == max(trial.value or 0 for trial in known.values())
    assert planner.study.best_value > 6  # higher is better, by the name
    for trial in known.values():
        assert 1e-5 <= trial.parameters["lr"] <= 1e-1
        assert trial.parameters["name"] in "ab"


def test_a_killed_search_continues(folder: SweepDir) -> None:
    """Trials that were proposed but not begun, ended but not told; and no repeated proposals."""
    known: dict[int, Trial] = {}
    first = search(folder)
    run(first, known, 3)
    untold = first.propose(known)
    assert untold is not None
    known[3] = replace(untold, state=TrialState.COMPLETE, value=8.0)
    unbegun = first.propose(known)
    assert unbegun is not None
    for trial in known.values():
        folder.write_trial(trial)

    planner = search(folder)
    for trial in known.values():
        planner.tell(trial)
    assert planner.study.best_value == 8.0
    assert planner.propose(known) == unbegun
    known[4] = replace(unbegun, state=TrialState.FAILED, error="ValueError: no")
    planner.tell(known[4])
    run(planner, known, 3)
    lrs = [trial.parameters["lr"] for trial in known.values()]
    assert len(set(lrs)) == len(lrs) == 8
    (name,) = optuna.get_all_study_names(open_journal(folder))
    assert name == folder.id
    ended = [trial.state.name for trial in planner.study.trials]
    assert ended == ["COMPLETE"] * 4 + ["FAIL"] + ["COMPLETE"] * 3


def test_an_incompletely_proposed_or_failed_trial_is_not_proposed(folder: SweepDir) -> None:
    planner = search(folder)
    half = planner.study.ask({"depth": optuna.distributions.IntDistribution(1, 8)})
    proposed = planner.propose({})
    assert proposed is not None
    assert proposed.number > half.number
    assert proposed.parameters.keys() == SPACE.keys()
    # A failed trial that is run again with --retries is finished for Optuna.
    planner.tell(replace(proposed, state=TrialState.FAILED, error="OSError"))
    assert not planner.report(proposed, [(0, 0.5)])


def test_pruner_stops_a_bad_trial_and_keeps_a_good_one(folder: SweepDir) -> None:
    known: dict[int, Trial] = {}
    planner = search(folder)
    for value in (0.5, 0.6, 0.7, 0.8, 0.9):
        trial = planner.propose(known)
        assert trial is not None
        assert not planner.report(trial, [(step, value) for step in range(3)])
        known[trial.number] = replace(trial, state=TrialState.COMPLETE, value=value)
        planner.tell(known[trial.number])
    for value, hopeless in ((0.1, True), (0.95, False)):
        trial = planner.propose(known)
        assert trial is not None
        assert planner.report(trial, [(0, value)]) == hopeless
        known[trial.number] = replace(trial, state=TrialState.PRUNED, value=value)
        planner.tell(known[trial.number])


def test_a_trial_that_runs_again_is_judged_by_what_it_logs_now(folder: SweepDir) -> None:
    known: dict[int, Trial] = {}
    planner = search(folder)
    run(planner, known, 5)  # of 1 to 8, at no step
    for value in (0.5, 0.6, 0.7, 0.8, 0.9):
        trial = planner.propose(known)
        assert trial is not None
        planner.report(trial, [(step, value) for step in range(9)])
        known[trial.number] = replace(trial, state=TrialState.COMPLETE, value=value)
        planner.tell(known[trial.number])
    trial = planner.propose(known)
    assert trial is not None
    first = replace(trial, started=1.0)
    assert not planner.report(first, [(step, 0.99) for step in range(7)])  # this attempt fails
    again = replace(trial, started=2.0, attempts=1)
    assert planner.report(again, [(0, 0.1)])
    assert planner.study.trials[trial.number].intermediate_values[0] == 0.1
    # The same after a stop: the journal has values of the attempt that was cut off.
    later = search(folder)
    assert not later.report(replace(trial, started=3.0), [(0, 0.99)])
    assert later.study.trials[trial.number].intermediate_values[0] == 0.99


def test_of_a_long_trial_the_pruner_gets_some_steps(folder: SweepDir) -> None:
    planner = search(folder)
    trial = planner.propose({})
    assert trial is not None
    for step in range(0, 3000, 100):
        planner.report(trial, [(each, 1.0) for each in range(step, step + 100)])
    steps = list(planner.study.trials[0].intermediate_values)
    assert steps[:101] == [*range(100), 100]
    assert len(steps) < 500
    assert max(steps) > 2900


def test_without_optuna(folder: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tpunb\[search\]'"):
        search(folder)
