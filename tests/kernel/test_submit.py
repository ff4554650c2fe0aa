"""`tpunb submit`: runs at a place, started from a terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbformat import v4

from tpunb.errors import TpunbError
from tpunb.kernel import submit
from tpunb.kernel.pipeline import RunRequest
from tpunb.machine.machine import Machine
from tpunb.places.target import LocalTarget
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils import files
from tpunb.utils.interrupts import counted_interrupts


class Pod(LocalTarget):
    """Like a place with two hosts without TPUs, with two ranks each."""

    hosts = ("a", "b")


GLOO = "import torch.distributed as dist\ndist.init_process_group('gloo')"
POD = Pod(Machine("local", "CPU", 0, "", 8, 2**34), cores=4)


@pytest.fixture
def prepare(tmp_path: Path) -> Callable[[str], RunRequest]:
    """Prepare a train cell with an option line, as `tpunb submit` does."""

    def prepare(line: str) -> RunRequest:
        notebook = v4.new_notebook(cells=[v4.new_code_cell(f"%%tpu_train {line}\n{GLOO}")])
        nbformat.write(notebook, tmp_path / "nb.ipynb")
        snapshot = submit._load(tmp_path / "nb.ipynb", None, {})
        return submit._prepare(snapshot, submit._options(snapshot), POD, tmp_path / "runs")

    return prepare


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--ranks 4", "--ranks: there is no rank 4"),
        ("--env PJRT_DEVICE=TPU", "--env PJRT_DEVICE=TPU: there is no TPU"),
        ("--resume", "--resume last: no run of this notebook in .* has saved a checkpoint"),
        ("--resume x", "there are no runs in"),
    ],
)
def test_errors_name_the_option_of_the_train_cell(
    prepare: Callable[[str], RunRequest], line: str, said: str
) -> None:
    with pytest.raises(TpunbError, match=said):
        prepare(line)


def test_ctrl_c_answers_the_question_of_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(prompt: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return "y"

    monkeypatch.setattr("builtins.input", pressed)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    with counted_interrupts(), pytest.raises(KeyboardInterrupt):
        submit._ask("Start it? ")


def test_resume_last_continues_from_the_latest_run_that_has_saved(
    prepare: Callable[[str], RunRequest], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "runs/20260101-000000-nb")
    run.attempt(0, 0).mkdir(parents=True)
    run.checkpoints.mkdir()
    run.write_spec(RunSpec(run.id, "nb", 2, "CPU", "/", (), ()))
    files.append_text(run.saving(0, 0), "0.1\n")
    files.write_json(run.snapshot, {"path": str(tmp_path / "nb.ipynb")})
    for line in ("--resume", "--resume last", "--resume nb"):
        request = prepare(line)
        assert request.resumed_from == run.id
        assert request.env["TPUNB_RESUME"] == str(run.checkpoints)
    request = prepare("--resume gs://bucket/run")
    assert request.resumed_from == request.env["TPUNB_RESUME"] == "gs://bucket/run"


@pytest.mark.parametrize(
    ("given", "cells", "name"),
    [
        ({}, [], "lr-0.1"),
        ({"rate": "0.5"}, [], "lr-0.5"),
        ({}, ["other = rate"], "lr-0.1"),
        ({}, ["rate = rate / 2"], None),
    ],
)
def test_option_line_uses_notebook_parameters(
    tmp_path: Path, given: dict[str, str], cells: list[str], name: str | None
) -> None:
    made = v4.new_notebook(
        cells=[
            v4.new_code_cell("rate, cores = 0, 0\nrate = 0.1", metadata={"tags": ["parameters"]}),
            *map(v4.new_code_cell, cells),
            v4.new_code_cell("%%tpu_train --name lr-{rate}\nx = 1"),
        ]
    )
    nbformat.write(made, tmp_path / "nb.ipynb")
    snapshot = submit._load(tmp_path / "nb.ipynb", None, given)
    if name is not None:
        assert submit._options(snapshot).name == name
        return
    with pytest.raises(TpunbError, match=r"lr-\{rate\}: 'rate' is not known before the run"):
        submit._options(snapshot)
