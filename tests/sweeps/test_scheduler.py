"""A sweep that was cut off at any moment continues where it was; no trial runs twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbformat import v4

from tpunb.errors import TpunbError
from tpunb.notebook.files import load_cells
from tpunb.notebook.parameters import defaults
from tpunb.places import kinds
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState
from tpunb.sweeps import folder as folders
from tpunb.sweeps import scheduler as scheduling
from tpunb.sweeps import study
from tpunb.sweeps.folder import SweepDir, SweepSpec, Trial, TrialState
from tpunb.sweeps.planner import Listed
from tpunb.sweeps.scheduler import Scheduler
from tpunb.sweeps.space import Choice
from tpunb.sweeps.study import Study, SweepOrder
from tpunb.sweeps.table import SweepTable
from tpunb.sweeps.worker import Reply
from tpunb.utils import memory, processes

TRIALS = [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3}]


def write(path: Path, *cells: str) -> Path:
    parameters = v4.new_code_cell("lr = 0.5\nseed = 0", metadata={"tags": ["parameters"]})
    made = [v4.new_code_cell("%load_ext tpunb"), parameters, *map(v4.new_code_cell, cells)]
    nbformat.write(v4.new_notebook(cells=made), path)
    return path


@pytest.fixture
def order(tmp_path: Path) -> SweepOrder:
    notebook = write(tmp_path / "nb.ipynb", "%%tpu_train\ntpunb.log(loss=lr)")
    known = defaults(load_cells(notebook))
    return SweepOrder(notebook, {"lr": Choice((0.1, 0.2, 0.3))}, known, metric="loss")


@pytest.fixture
def sweep(order: SweepOrder, tmp_path: Path) -> SweepDir:
    return folders.open_sweep(tmp_path / "runs", order.spec(), again=False)


def ran(sweep: SweepDir, number: int, loss: float, state: RunState = RunState.SUCCEEDED) -> RunDir:
    """Make an ended run of a trial."""
    run = RunDir(sweep.path.parent.parent / f"20260101-00000{number}-nb")
    run.path.mkdir()
    row = {"rank": 0, "time": 1.0, "step": 3, "loss": loss, "attempt": 0}
    run.metrics.write_text(json.dumps(row) + "\n")
    run.write_result(RunResult(state, "nb", 1, "CPU", 10.0, 15.0, run.path))
    sweep.runs_file(number).write_text(f"{run.path}\n")
    return run


def executed(sweep: SweepDir, number: int, **told: Any) -> None:
    notebook = v4.new_notebook(metadata={"papermill": told})
    nbformat.write(notebook, sweep.executed(number))


def prepared(sweep: SweepDir, order: SweepOrder, **options: Any) -> Scheduler:
    planner, spec = Listed(TRIALS), sweep.read_spec()
    options = {"code": order.code(), "show": lambda trials: None, **options}
    made = Scheduler(sweep, spec, planner, order.known, **options)
    made.prepare()
    return made


def test_a_trial_whose_end_was_not_recorded_is_complete(sweep: SweepDir, order: SweepOrder) -> None:
    """The sweep was killed between the notebook's end and the write of the record."""
    sweep.write_trial(Trial(0, TRIALS[0], TrialState.RUNNING, started=5.0))
    ran(sweep, 0, 0.25)
    executed(sweep, 0, end_time="2026-01-01T00:00:15", exception=None)
    trial = prepared(sweep, order).trials[0]
    assert (trial.state, trial.value, trial.step) == (TrialState.COMPLETE, 0.25, 3)
    assert (trial.duration, trial.attempts) == (10.0, 1)
    assert sweep.read_trials()[0] == trial


@pytest.mark.parametrize("told", [{}, {"end_time": None}, {"end_time": "x", "exception": True}])
def test_a_trial_that_was_cut_off_runs_again(
    sweep: SweepDir, order: SweepOrder, told: dict[str, Any]
) -> None:
    sweep.write_trial(Trial(0, TRIALS[0], TrialState.RUNNING, started=5.0))
    ran(sweep, 0, 0.25)
    if told:
        executed(sweep, 0, **told)
    trial = prepared(sweep, order).trials[0]
    assert (trial.state, trial.started, trial.attempts) == (TrialState.WAITING, None, 0)


@pytest.mark.usefixtures("starts_processes")
def test_processes_that_a_killed_sweep_left_in_any_slot_are_ended(
    sweep: SweepDir, order: SweepOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_LEFT", 0.0)
    sweep.write_trial(Trial(0, TRIALS[0], TrialState.RUNNING, started=5.0))
    variables = {**os.environ, "TPUNB_SWEEP": f"{sweep.path}#64"}
    with subprocess.Popen(["sleep", "600"], env=variables) as left:
        reaper = threading.Thread(target=left.wait)
        reaper.start()
        try:
            prepared(sweep, order)
            assert left.poll() == -9
        finally:
            left.kill()
            reaper.join()


def test_a_failed_trial_stays_failed_unless_it_has_attempts_left(
    sweep: SweepDir, order: SweepOrder
) -> None:
    failed = Trial(0, TRIALS[0], TrialState.FAILED, error="too high", attempts=1)
    sweep.write_trial(failed)
    assert prepared(sweep, order)._order == []
    assert prepared(sweep, order, retries=1)._order == [0]
    assert sweep.read_trials()[0] == failed


def test_cost_question_covers_all_runs_of_a_sweep(
    order: SweepOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "places.toml").write_text(
        '[places.pod]\nkind = "ssh"\nhosts = ["h0"]\nask_above = 20\n'
    )
    asked: list[int] = []

    def confirm(target: Any, timeout: float | None, ask: Any, yes: str, *, runs: int) -> None:
        asked.append(runs)
        raise TpunbError("the answer was no")

    monkeypatch.setattr(kinds, "find_target", lambda *given: None)
    monkeypatch.setattr(study, "confirm_cost", confirm)
    placed = replace(order, on="pod", retries=1)
    for trial in (None, Trial(0, TRIALS[0], TrialState.FAILED, attempts=1)):
        if trial is not None:
            folders.open_sweep(tmp_path / "runs", placed.spec(), again=False).write_trial(trial)
        with pytest.raises(TpunbError, match="the answer was no"):
            study.run_sweep(placed, tmp_path / "runs")
    assert asked == [6, 5]
    with pytest.raises(TpunbError, match="pdo"):
        replace(order, on="pdo").check()
    assert (
        prepared(
            folders.open_sweep(tmp_path / "runs", order.spec(), again=False), order
        ).runs_left()
        == 3
    )


def test_a_trial_that_ran_in_another_sweep_is_not_run_again(
    sweep: SweepDir, order: SweepOrder, tmp_path: Path
) -> None:
    spec = sweep.read_spec()
    run = ran(sweep, 0, 0.25)
    done = Trial(0, TRIALS[0], TrialState.COMPLETE, 0.25, 3, runs=(str(run.path),), attempts=1)
    sweep.write_trial(done)
    sweep.note_done(folders.trial_key(spec, order.known, done.parameters), done)

    wider = replace(order, space={"lr": Choice((0.4, 0.1))})
    other = folders.open_sweep(tmp_path / "runs", wider.spec(), again=False)
    assert other.id != sweep.id
    found = prepared(other, wider)._done_before(Trial(1, {"lr": 0.1}))
    assert found is not None
    assert (found.number, found.value, found.copied_from) == (1, 0.25, f"{sweep.id}/0")
    # A parameter with its default value gives the same key as one that is not given.
    known = order.known
    same = folders.trial_key(spec, known, {"lr": 0.1, "seed": 0})
    assert same == folders.trial_key(spec, known, {"lr": 0.1})
    # With another notebook, packages, cores or place, the key differs.
    for name in ("code", "packages", "cores", "place"):
        changed = replace(spec, **{name: "other"})
        assert folders.trial_key(changed, known, {"lr": 0.1}) != same


def test_a_copied_trial_has_no_value_of_another_metric(
    sweep: SweepDir, order: SweepOrder, tmp_path: Path
) -> None:
    run = ran(sweep, 0, 0.25)
    done = Trial(0, TRIALS[0], TrialState.COMPLETE, 0.25, 3, runs=(str(run.path),), attempts=1)
    sweep.write_trial(done)
    sweep.note_done(folders.trial_key(sweep.read_spec(), order.known, done.parameters), done)
    for changes, value in ({"metric": "accuracy"}, None), ({"maximize": True}, 0.25):
        spec = replace(sweep.read_spec(), **changes)
        other = folders.open_sweep(tmp_path / "runs", spec, again=False)
        found = other.find_done(
            folders.trial_key(spec, order.known, done.parameters), replace(done, number=7), spec
        )
        assert (None if found is None else found.value) == value


def test_a_metric_that_is_nan_or_of_many_steps(sweep: SweepDir, order: SweepOrder) -> None:
    scheduler = prepared(sweep, order)
    run = ran(sweep, 0, float("nan"))
    trial = Trial(0, TRIALS[0], TrialState.RUNNING, started=5.0)
    assert scheduler._finished(trial, Reply(False)).error == "all logged values of loss are NaN"
    row = {"rank": 0, "time": 1.0, "step": 0, "loss": 0.5, "attempt": 0, "x" * 5000: 0.0}
    many = 21_000_000 // len(json.dumps(row))
    run.metrics.write_text(f"{json.dumps(row)}\n" * many)
    assert scheduler._finished(trial, Reply(False)).value == 0.5


def test_again_option_makes_a_new_folder_and_the_newest_is_resumed(
    order: SweepOrder, tmp_path: Path
) -> None:
    runs, spec = tmp_path / "runs", order.spec()
    first = folders.open_sweep(runs, spec, again=False)
    assert folders.open_sweep(runs, spec, again=False).path == first.path
    second = folders.open_sweep(runs, spec, again=True)
    assert second.path != first.path
    assert second.read_spec().again
    assert prepared(second, order)._again  # trials of other sweeps run again, too
    assert folders.open_sweep(runs, spec, again=False).path == second.path


def test_code_digest_includes_modules_of_the_notebook(tmp_path: Path) -> None:
    notebook = write(tmp_path / "nb.ipynb", "from mine.net import Net")
    (tmp_path / "mine").mkdir()

    def digest() -> str:
        return folders.code_digest(load_cells(notebook), (tmp_path,))

    seen = set()
    for text in ("import layers", "import layers, mine", "import layers"):
        (tmp_path / "mine" / "net.py").write_text(text)
        seen.add(digest())
    assert len(seen) == 2
    for text in ("from mine import net", "a = 1"):  # a module that only the module imports
        (tmp_path / "layers.py").write_text(text)
        seen.add(digest())
    assert len(seen) == 4


def test_trial_is_identified_by_its_modules(
    sweep: SweepDir, order: SweepOrder, tmp_path: Path
) -> None:
    """The module is edited between two trials, during a trial, or not at all."""
    write(order.notebook, "%%tpu_train\nimport mine\ntpunb.log(loss=lr)")
    (tmp_path / "mine.py").write_text("a = 1")
    sweep = folders.open_sweep(tmp_path / "runs", order.spec(), again=False)
    scheduler = prepared(sweep, order)
    began = [scheduler._code()]
    (tmp_path / "mine.py").write_text("a = 2")
    began.append(scheduler._code())
    for number, code in enumerate([began[1], began[0]]):
        ran(sweep, number, 0.25)
        trial = Trial(number, TRIALS[number], TrialState.RUNNING, started=5.0, code=code)
        scheduler._put(scheduler._finished(trial, Reply(False)))
    # The second trial may have run with either version.
    assert len(list((sweep.path.parent / "done").iterdir())) == 1
    for text, found in (("a = 2", True), ("a = 1", False)):
        (tmp_path / "mine.py").write_text(text)
        other = prepared(folders.open_sweep(tmp_path / "runs", order.spec(), again=True), order)
        other._again = False
        assert (other._done_before(Trial(0, TRIALS[0])) is not None) == found
        assert other._done_before(Trial(1, TRIALS[1])) is None
    said = SweepTable(sweep.read_spec(), scheduler.trials, 3).headline()
    assert said.endswith("modules were edited before trial 0 began")


def test_second_trial_starts_when_memory_for_both_is_known(
    sweep: SweepDir, order: SweepOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial may also start next to one that never logs anything."""
    now, free, taken = [100.0], [1000], {"#0": 0, "#1": 0}
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "available_memory", lambda: free[0])
    monkeypatch.setattr(processes, "with_variables", lambda marks: [SimpleNamespace(pid=marks[0])])
    monkeypatch.setattr(memory, "added_memory", lambda base, marks: taken[marks[0]])
    scheduler = prepared(sweep, order, jobs=2)
    first, second = scheduler._slots

    def room(taken_now: int, seconds: float) -> bool:
        now[0] += seconds
        taken["#0"] = taken_now
        scheduler._measure_memory()
        return scheduler._has_room()

    assert scheduler._has_room()
    run = ran(sweep, 0, 0.25)
    run.metrics.unlink()
    trial = Trial(0, TRIALS[0], TrialState.RUNNING)
    worker: Any = SimpleNamespace(mark="#0")
    first.trial, first.worker, first.grown = trial, worker, now[0]
    assert not room(300, 60)  # its kernel is running, but has no run yet
    first.trial = replace(trial, runs=(str(run.path),))
    assert not room(400, 60)  # its memory is growing
    assert not room(405, 10)
    assert room(405, 20)  # it has logged nothing, but is steady at 405
    free[0] = 400
    assert not room(405, 10)
    free[0] = 500
    assert not room(300, 10)  # the running trial may need as much again
    free[0] = 1000
    assert room(300, 10)
    # The maximum memory of a trial is known when it has ended.
    second.trial, second.worker = trial, SimpleNamespace(mark="#1")  # type: ignore[assignment]
    taken["#1"] = 900
    assert not room(405, 10)


def test_run_that_outlives_its_notebook_fails_the_trial(
    sweep: SweepDir, order: SweepOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ran(sweep, 0, 0.25)
    run.result.unlink()
    run.write_spec(RunSpec(run.id, "nb", 1, "CPU", "/", (), ()))
    monkeypatch.setattr(scheduling, "_GRACE", -15.0)
    with run.take_lock() or pytest.fail("it is another's"):
        trial = Trial(0, TRIALS[0], TrialState.RUNNING, started=5.0)
        ended = prepared(sweep, order)._finished(trial, Reply(False))
    assert ended.error == f"run {run.id} is still running, although its notebook has ended"


def test_chip_hours_of_a_trial(sweep: SweepDir, order: SweepOrder) -> None:
    run = ran(sweep, 0, 0.25)
    spec = RunSpec(run.id, "nb", 1, "TPU", "/", (), (), spmd=8, devices_per_chip=2)
    for made, chips in (
        (spec, 4),
        (replace(spec, spmd=None), 1),
        (replace(spec, spmd=None, world_size=8, devices_per_chip=1), 8),
        (replace(spec, spmd=None, world_size=8), 4),  # TorchTPU on TPU7x
        (replace(spec, spmd=None), 1),
        (replace(spec, device="CPU"), 0),
    ):
        run.write_spec(made)
        trial = Trial(0, TRIALS[0], TrialState.RUNNING, started=5.0)
        ended = prepared(sweep, order)._finished(trial, Reply(False), when=3605.0)
        assert ended.chip_hours == (chips or None)


def test_sweep_is_locked_to_one_process(sweep: SweepDir) -> None:
    refused = pytest.raises(TpunbError, match=f"already running, in process {os.getpid()}")
    with sweep.locked(), refused, sweep.locked():
        pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"lrr": Choice((1,))}}, "lrr: .*no such parameter; did you mean lr"),
        ({"jobs": 0}, "must be at least 1"),
        ({"space": {}}, "no parameters: add"),
        ({"random": 2, "search": 2}, "--random and --search"),
        ({"search": 2, "metric": None}, "--search needs --metric"),
        ({"maximize": True, "metric": None}, "--maximize needs --metric"),
        ({"trials": [{"lr": 1}]}, "trials= cannot be combined"),
        ({"random": 0}, "--random 0: must be between 1 and 10,000"),
        ({"search": 10_001}, "--search 10001: must be between 1 and 10,000"),
    ],
)
def test_contradictory_options_are_refused(
    order: SweepOrder, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(TpunbError, match=said):
        replace(order, **changes).check()
    assert not (tmp_path / "runs").exists()


# The table


def table(spec: SweepSpec, *trials: Trial, total: int = 0) -> SweepTable:
    return SweepTable(spec, {trial.number: trial for trial in trials}, total)


def test_sweep_table_is_sorted_and_complete(order: SweepOrder) -> None:
    made = table(
        order.spec(),
        Trial(0, {"lr": 0.1, "seed": 1}, TrialState.COMPLETE, 0.5, 3, started=1.0, ended=2.0),
        Trial(1, {"lr": 0.2, "seed": 1}, TrialState.FAILED, 0.0, error="ValueError: <b>"),
        Trial(2, {"lr": 0.3, "seed": 1}, TrialState.COMPLETE, 0.0, 3, started=1.0, ended=3.0),
        Trial(3, {"lr": 0.4, "seed": 1}, TrialState.PRUNED, 0.7, 1, started=1.0, ended=2.0),
        total=6,
    )
    assert [trial.number for trial in made.sorted()] == [2, 0, 3, 1]
    assert made.best is not None
    assert made.best.number == 2
    assert made.parameters == ["lr"]
    assert made.headline() == (
        "6 trials: 2 complete, 1 pruned, 1 failed, 2 waiting · best loss 0 in trial 2"
    )
    lines = made.text().splitlines()
    assert re.match(r"★ +2 +0.3 +complete +0 +3 +2 s", lines[2])
    assert lines[-1].endswith("ValueError: <b>")
    assert "&lt;b&gt;" in made.html()
    assert "<b>ValueError" not in made.html()
    assert [line[3] for line in made.text(2).splitlines()[2:4]] == ["2", "0"]
    assert made.text(2).endswith("and 2 more")


@pytest.mark.parametrize("width", [50, 80, 120])
def test_a_narrow_terminal_shows_the_most_important_columns(order: SweepOrder, width: int) -> None:
    error = "rank 0 failed in cell [4], line 6: ValueError: the learning rate is too high"
    runs = ("/runs/20261123-091353-train",)
    times = {"started": 1.0, "ended": 90.0}
    made = table(
        order.spec(),
        Trial(0, {"lr": 0.1, "run": 1}, TrialState.COMPLETE, 0.5, 3, runs=runs, **times),
        Trial(1, {"lr": 0.2, "run": 2}, TrialState.FAILED, runs=runs, error=error, **times),
    )
    lines = made.text(width=width).splitlines()[1:]
    assert max(map(len, lines)) <= width
    assert ("20261123" in lines[1]) == (width == 120)
    assert ("1 min" in lines[1]) == (width > 50)
    assert lines[1].split()[:5] == ["★", "0", "0.1", "1", "complete"]
    assert "rank 0 failed" in lines[2]


def test_table_columns_stay_the_same_during_a_sweep(order: SweepOrder) -> None:
    """The first trials of a grid have one value of its first parameter."""
    trials = [Trial(n, {"lr": 0.1, "seed": n}, TrialState.RUNNING) for n in range(2)]
    spaces = {"lr": Choice((0.1, 0.2)), "seed": Choice((0, 1)), "one": Choice((1,))}
    assert table(replace(order, space=spaces).spec(), *trials).parameters == ["lr", "seed"]
    listed = replace(order, space={}, trials=[{"lr": 0.1, "seed": 0}, {"lr": 0.2, "seed": 0}])
    assert table(listed.spec(), trials[0]).parameters == ["lr"]


def test_higher_values_are_better_by_the_metrics_name_or_the_users_choice(
    order: SweepOrder,
) -> None:
    trials = [
        Trial(n, {"lr": n}, TrialState.COMPLETE, value, metrics={"accuracy": value})
        for n, value in enumerate((0.5, 0.9, 0.7))
    ]
    for changes in ({"metric": "accuracy"}, {"metric": "x", "maximize": True}, {"metric": None}):
        made = table(replace(order.spec(), **changes), *trials)
        assert [trial.number for trial in made.sorted()] == [1, 2, 0]
    assert table(replace(order.spec(), metric="x"), *trials).best == trials[0]


def test_ten_thousand_trials_are_a_short_table(sweep: SweepDir, order: SweepOrder) -> None:
    """Running, failed and best trials are shown; the DataFrame has all."""
    states = {7: TrialState.FAILED, 9: TrialState.RUNNING}
    trials = {
        n: Trial(n, {"lr": n / 7}, states.get(n % 1000, TrialState.COMPLETE), n / 1e4, 3)
        for n in range(10_000)
    }
    made = SweepTable(order.spec(), trials, 10_000)
    assert len(made.html()) < 100_000
    assert ">and 9,900 more<" in made.html()
    text = made.text().splitlines()
    assert len(text) == 103
    assert sum("running" in line for line in text[2:]) == 10
    assert sum("failed" in line for line in text[2:]) == 10
    assert text[2].split()[1] == "0"
    assert text[-1].endswith("and 9,900 more")
    for number in range(200):
        sweep.write_trial(trials[number])
    listed = Study(sweep, 200)
    frame = listed.table()
    assert len(frame) == 200
    assert list(frame["loss"][:2]) == sorted(frame["loss"][:2])
    assert len(listed._repr_html_()) < 100_000
    assert sum(file.stat().st_size for file in sweep.trials.iterdir()) < 200_000


# Sweeps in real processes that are killed

CELL = """
%%tpu_train --cores 1
import os, time, tpunb
with open("ran.txt", "a") as file:
    file.write(f"begin {lr}\\n")
for step in range(3):
    tpunb.log(step, loss=(lr - 0.2) ** 2)
while os.path.exists(f"hold-{lr}"):
    time.sleep(0.02)
with open("ran.txt", "a") as file:
    file.write(f"end {lr}\\n")
"""


def begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tpunb", "sweep", "nb.ipynb", "--grid", "lr=0.1,0.2,0.3"]
    return subprocess.Popen(
        [*command, "--metric", "loss"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 300
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


def lines(folder: Path) -> list[str]:
    file = folder / "ran.txt"
    return file.read_text().splitlines() if file.exists() else []


def states(folder: Path) -> Mapping[int, str]:
    found = {}
    for path in sorted(folder.glob("runs/sweeps/nb-*/trials/*.json")):
        trial = json.loads(path.read_text())
        found[trial["number"]] = trial["state"]
    return found
