"""Preparation of a run: the request, lint's findings, and the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tpunb.errors import LintError, TpunbError
from tpunb.kernel import pipeline
from tpunb.kernel.options import TRAIN
from tpunb.kernel.pipeline import PreparedNotebook, RunRequest, find_checkpoints
from tpunb.machine.environment import EnvChange, SpmdEnvironment
from tpunb.machine.machine import Machine
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.lint.findings import Finding
from tpunb.notebook.models import Cell, LeftOut, Snapshot
from tpunb.places.target import LocalTarget
from tpunb.runs.directory import RunDir, new_run
from tpunb.runs.events import Note
from tpunb.runs.spec import Device, RunSpec

CELLS = (
    Cell(0, "code", "!pip install x\nx = 1", 1),
    Cell(1, "code", "# tpu: skip\ny = 1", 2),
    Cell(2, "code", "%%tpu_train\nprint(x)", 4),
    Cell(3, "code", "z = 1", 3),
)
HINT = Finding("a-rule", "hint", 1, 2, "it is odd", "make it even", source="x = 1")


def notebook(
    snapshot: Snapshot, *findings: Finding, replicate: str | None = None
) -> PreparedNotebook:
    return PreparedNotebook(snapshot, convert(snapshot), replicate, findings)


def request(
    notebook: PreparedNotebook,
    line: str = "",
    *,
    device: Device = "CPU",
    cores: int = 2,
    spmd: SpmdEnvironment | None = None,
    changes: tuple[EnvChange, ...] = (),
) -> RunRequest:
    machine = Machine("local", device, 0, "", 8, 2**34)
    options = TRAIN.parse_line(line, {})
    here = LocalTarget(machine, {})
    return RunRequest(options, notebook, machine, cores, spmd, {}, changes, here, frozenset())


SMALL = Snapshot((Cell(0, "code", "%%tpu_train\n1", 1),), 0, None, "the test")


def test_the_plan_lists_omissions_with_their_reasons() -> None:
    never, failed = Cell(1, "code", "a = 1\nb = 2"), Cell(1, "code", "1 / 0", 3)
    left_out = ((never, LeftOut.NEVER_RAN), (failed, LeftOut.FAILED))
    snapshot = Snapshot(CELLS, 2, "nb.ipynb", "the test", ("a note",), left_out)
    changes = (EnvChange("A", "1", "a reason"), EnvChange("B", None, "another"))
    wanted = request(notebook(snapshot, HINT), changes=changes)
    script = wanted.notebook.script.text.rstrip()
    assert pipeline.describe_plan(wanted).removesuffix(f"\n\n{script}").split("\n") == [
        "notebook: nb.ipynb (from the test)",
        "a note",
        "prelude: [1]; train cell: [4]",
        "2 rehearsal cores on CPU; the prelude runs once, then the ranks are forked",
        "backend: torch_xla",
        "left out:",
        "  cell [ ]: a = 1  (it never ran in this kernel)",
        "  cell [3]: 1 / 0  (it failed)",
        "  cell [1], line 1: !pip install x  (shell commands run once, in the notebook)",
        "  cell [2], line 1: # tpu: skip  (it begins with '# tpu: skip')",
        "  cell [3], line 1: z = 1  (it is below the train cell)",
        "differences between the ranks' environment and the kernel's:",
        "  A = 1  (a reason)",
        "  B removed  (another)",
        "lint:",
        "  cell [1], line 2: hint: it is odd [a-rule]",
        "      x = 1",
        "    → make it even",
    ]


def test_options_go_into_the_spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    line = "--name mine --returns a,b --timeout 5m --hang-timeout 0 --grace 1m --retries 2"
    spec = request(notebook(SMALL, replicate="why"), f"{line} --profile 0:1-2").spec("an-id")
    assert (spec.id, spec.name, spec.world_size, spec.device) == ("an-id", "mine", 2, "CPU")
    assert (spec.timeout, spec.hang_timeout, spec.grace, spec.retries) == (300, 0, 60, 2)
    assert (spec.returns, spec.replicate, spec.cwd) == (("a", "b"), "why", str(tmp_path))
    assert spec.profile is not None
    assert (spec.spmd, spec.profile.ranks) == (None, (0,))


def test_spmd_has_one_rank() -> None:
    spmd = SpmdEnvironment("cell [1] calls use_spmd()", 4, (), {})
    wanted = request(notebook(SMALL), cores=4, spmd=spmd)
    spec = wanted.spec("an-id")
    assert (spec.world_size, spec.spmd) == (1, 4)
    [note] = wanted.notes(spec)
    assert note.text == "SPMD: one process drives all 4 rehearsal cores (cell [1] calls use_spmd())"


def test_lint_refuses_only_code_that_certainly_fails() -> None:
    certain = Finding("retired-name", "error", 1, 1, "it fails", "mend it", certain=True)
    notebook(SMALL, HINT).raise_for_lint()
    with pytest.raises(LintError) as refused:
        notebook(SMALL, HINT, certain).raise_for_lint()
    assert refused.value.findings == (certain,)


def test_lint_tells_once_of_the_train_cell() -> None:
    warning = Finding("w", "warning", 3, 7, "it may hang", "do not")
    own = Finding("w", "warning", 4, 1, "it is slow", "do it faster", own=True)
    below = replace(own, cell=6, below=True, source="  plot(m)", message="it is old")
    again = replace(own, line=5)
    beside = replace(own, rule="v", message="it is odd")
    wanted = request(notebook(SMALL, HINT, warning, own, below, again, beside))
    spec = wanted.spec("an-id")
    assert wanted.notes(spec) == [
        Note("lint: cell [4], line 1: it is slow. Fix: do it faster"),
        Note("lint: below, `plot(m)`: it is old. Fix: do it faster"),
    ]
    assert [note.minor for note in wanted.notes(spec)] == [True, True]


HERE = LocalTarget(Machine("local", "CPU", 0, "", 8, 2**34))


def saved(runs: Path, snapshot: str) -> RunDir:
    """A run that has saved a checkpoint."""
    with new_run(runs, "n") as run:
        run.write_spec(RunSpec(run.id, "n", 1, "CPU", "/", (), ()))
    run.attempt(0, 0).mkdir(parents=True)
    run.saving(0, 0).write_text("1.0\n")
    run.checkpoints.mkdir()
    run.snapshot.write_text(snapshot)
    return run


@pytest.mark.parametrize("damaged", ["{", "[1]", "{}"])
@pytest.mark.parametrize("notebook", ["/nb.ipynb", None])
def test_last_passes_over_runs_with_a_damaged_notebook(
    tmp_path: Path, damaged: str, notebook: str | None
) -> None:
    ours = saved(tmp_path, json.dumps({"path": notebook}))
    saved(tmp_path, damaged)
    assert find_checkpoints("last", tmp_path, notebook, HERE) == (str(ours.checkpoints), ours.id)
    with pytest.raises(TpunbError, match="no run of this notebook"):
        find_checkpoints("last", tmp_path, "/other.ipynb", HERE)
