"""More of tests/scenarios/test_values_flow.py, which takes longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat import v4

from tests.drivers.kernel import ROOT
from tests.scenarios.test_values_flow import THREE, ends


@pytest.mark.usefixtures("starts_processes")
def test_train_cells_give_equal_numbers_in_nbclient_papermill_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "three.ipynb"
    notebook = v4.new_notebook(cells=[v4.new_code_cell(dedent(source).strip()) for source in THREE])
    nbformat.write(notebook, path)
    nbformat.write(notebook, tmp_path / "other.ipynb")
    seen: dict[str, set[str]] = {}

    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    seen["nbclient"] = ends(nbformat.writes(notebook))

    done = papermill.execute_notebook(
        str(tmp_path / "other.ipynb"), None, cwd=str(tmp_path), kernel_name="python3"
    )
    seen["papermill"] = ends(nbformat.writes(done))

    tpunb = [sys.executable, "-m", "tpunb", "convert", str(path), "-o", str(tmp_path / "script.py")]
    subprocess.run(tpunb, check=True)
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*torchrun, "--standalone", str(tmp_path / "script.py")],
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    seen["torchrun"] = ends(ran.stdout)

    [numbers] = seen["nbclient"]
    assert seen == {how: {numbers} for how in ("nbclient", "papermill", "torchrun")}
    before, after, *_ = map(float, numbers.split())
    assert before < 0.6 < after
