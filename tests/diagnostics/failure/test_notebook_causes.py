"""What the notebook shows of a failure's cause comes first."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.notebook.lint.notebooks import notebook
from tpunb.diagnostics.failure.run import diagnose_run
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import FailureKind

TRAIN = """%%tpu_train
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
for batch in data:
    if xr.global_ordinal() == 0:
        xm.mesh_reduce("loss", 1.0, sum)
"""
LOG = "[0] tpunb.errors.PeerLostError: rank 1 has returned from the train cell\n"


def failed(
    folder: Path,
    train: str = TRAIN,
    *,
    line: int = 6,
    type: str = "PeerLostError",
    kind: FailureKind = FailureKind.PEER_LOST,
) -> RunResult:
    (folder / "notebook.json").write_text(json.dumps(asdict(notebook("data = [1]", train))))
    (folder / "run.log").write_text(LOG)
    failure = Failure(0, 1, 1, None, type, "", 2, line, "", 0.0, kind=kind)
    return RunResult("failed", "x", 2, "CPU", 0.0, 1.0, folder, 1, failures=(failure,))


def causes(result: RunResult) -> list[tuple[str, float]]:
    return [(one.id, one.confidence) for one in diagnose_run(result)]


def test_it_comes_before_causes_from_the_log(tmp_path: Path) -> None:
    first, *_ = diagnose_run(failed(tmp_path))
    assert first.id == "collective-on-some-ranks"
    assert first.cause == (
        "In cell [2], line 6 `mesh_reduce` is called only on ranks with "
        "`xr.global_ordinal() == 0` and waits forever for the others."
    )
    assert first.fix == "Call it on every rank, and only print or write under the condition."
    [evidence] = first.evidence
    assert str(evidence) == 'cell [2]: line 6: xm.mesh_reduce("loss", 1.0, sum)'


def test_if_ranks_failed_in_another_line_it_must_be_the_only_finding(tmp_path: Path) -> None:
    elsewhere = failed(tmp_path, line=9, type="MismatchError", kind=FailureKind.EXCEPTION)
    assert causes(elsewhere)[0] == ("collective-on-some-ranks", 0.75)
    two = f"{TRAIN}    if xr.global_ordinal() == 1:\n        xm.rendezvous('b')\n"
    ids = [name for name, _ in causes(failed(tmp_path, two, line=9))]
    assert "collective-on-some-ranks" not in ids
    hung = failed(tmp_path, line=9, type="Hang", kind=FailureKind.HANG)
    assert "collective-on-some-ranks" not in [name for name, _ in causes(hung)]


@pytest.mark.parametrize(
    ("type", "kind"),
    [("KeyError", FailureKind.EXCEPTION), ("Signal", FailureKind.SIGNAL)],
)
def test_another_failure_in_that_line_has_another_cause(
    tmp_path: Path, type: str, kind: FailureKind
) -> None:
    ids = [name for name, _ in causes(failed(tmp_path, type=type, kind=kind))]
    assert "collective-on-some-ranks" not in ids


@pytest.mark.parametrize("text", ["", "{}", '{"cells": [{}], "train": 0}'])
def test_a_folder_without_its_notebook(tmp_path: Path, text: str) -> None:
    result = failed(tmp_path)
    (tmp_path / "notebook.json").write_text(text)
    assert "collective-on-some-ranks" not in [name for name, _ in causes(result)]


def test_another_train_cell_is_no_cause(tmp_path: Path) -> None:
    result = failed(tmp_path, line=3)
    ours = "%%tpu_train\nimport torch_xla.core.xla_model as xm\nxm.rendezvous('end')\n"
    cells = notebook("data = [1]", TRAIN, ours)
    (tmp_path / "notebook.json").write_text(json.dumps(asdict(cells)))
    assert "collective-on-some-ranks" not in [name for name, _ in causes(result)]


@pytest.mark.parametrize(
    ("source", "kind", "cell", "named"),
    [
        ("mp.spawn(train)", FailureKind.EXCEPTION, 1, True),
        ("mp.spawn(train)", FailureKind.PEER_LOST, 2, True),
        ("mp.spawn(train)", FailureKind.EXCEPTION, 2, False),
        ("# tpu: skip\nmp.spawn(train)", FailureKind.PEER_LOST, 2, False),
    ],
)
def test_a_cell_that_did_not_finish_in_the_kernel(
    tmp_path: Path, source: str, kind: FailureKind, cell: int, named: bool
) -> None:
    result = failed(tmp_path, "%%tpu_train\nprint(data)", type="DistNetworkError", kind=kind)
    saved = notebook(source, "%%tpu_train\nprint(data)")
    cells = (replace(saved.cells[0], failed=True), saved.cells[1])
    (tmp_path / "notebook.json").write_text(json.dumps(asdict(replace(saved, cells=cells))))
    result = replace(result, failures=(replace(result.failures[0], cell=cell),))
    assert (causes(result)[:1] == [("unfinished-cell", 0.95)]) == named
