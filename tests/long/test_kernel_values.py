"""More of tests/scenarios/test_kernel_values.py, which takes longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

import tpunb
from tests.drivers.kernel import Kernel
from tests.scenarios.test_kernel_values import SHOW, _fresh, last, nb, train

pytestmark = pytest.mark.usefixtures("lent")


@pytest.mark.parametrize("options", ["", "--replicate"])
def test_kernel_values_changed_by_a_cell_below_reach_the_run(nb: Kernel, options: str) -> None:
    train(nb, "pass").good()
    nb.run("lr = 0.1; config['width'] = 16; x += 1", "below").good()
    ran = train(nb, SHOW, options).good()
    assert "[0] 0.1 16 10.0 4.0" in ran.stdout
    assert "lr: 0.1 from the kernel; cell [" in ran.stdout
    assert "config['width']: 16 from the kernel; cell [" in ran.stdout
    assert "changes `x`, which this run has as the cells above make it" in ran.stdout
    table = tpunb.runs(nb.folder / "runs")
    assert table.iloc[0]["params.lr"] == 0.1
    assert table.iloc[0]["params.config.width"] == 16
    written = json.loads(last(nb).result.read_text())["parameters"]
    assert written["lr"] == 0.1
    replayed = train(nb, SHOW, "--replay").good()
    assert "[0] 0.01 8 1.0 4.0" in replayed.stdout
    assert "kernel" not in replayed.stdout
    assert tpunb.runs(nb.folder / "runs").iloc[0]["params.lr"] == 0.01


def test_loop_over_a_train_cell_uses_each_kernel_value(nb: Kernel) -> None:
    ran = nb.run(
        """
results = {}
for lr in (0.1, 0.02):
    get_ipython().run_cell_magic("tpu_train", f"--name lr{lr} --returns got", "got = scaled(100)")
    results[lr] = got
print(results)
""",
        "loop",
    ).good()
    assert "{0.1: 10.0, 0.02: 2.0}" in ran.stdout
    table = tpunb.runs(nb.folder / "runs").iloc[:2]
    assert table["params.lr"].tolist() == [0.02, 0.1]
    assert table["name"].tolist() == ["lr0.02", "lr0.1"]
    after = train(nb, "print(lr, results)").good()  # the loop is no part of it, what it left is
    assert "0.02 {0.1: 10.0, 0.02: 2.0}" in after.stdout


def test_papermill_parameters_are_recorded_with_the_run(tmp_path: Path) -> None:
    """Those that ran, of `tpunb run -p` and of papermill itself."""
    tagged = v4.new_code_cell("lr = 0.002\nsteps = 3", metadata={"tags": ["parameters"]})
    sources = ("import torch", "%%tpu_train --cores 1\nprint('lr', lr)")
    rest = [v4.new_code_cell(source) for source in sources]
    cells = [v4.new_code_cell("%load_ext tpunb"), tagged, *rest]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "in.ipynb")
    parameters = ["-p", "lr", "0.1", "-p", "extra", "7"]
    tools = Path(sys.executable).parent
    for command in (
        [str(tools / "tpunb"), "run", "in.ipynb", "out.ipynb", *parameters[:3]],
        [
            *(str(tools / "papermill"), "in.ipynb", "out2.ipynb", *parameters),
            *("-k", "python3", "--language", "python", "--no-progress-bar"),
        ],
    ):
        subprocess.run(command, cwd=tmp_path, check=True, env=dict(os.environ), timeout=600)
    frame = tpunb.runs(tmp_path / "runs")
    assert frame["params.lr"].tolist() == [0.1, 0.1]
    assert frame["params.steps"].tolist() == [3, 3]
    assert frame["params.extra"].tolist()[0] == 7
