"""Notebooks that nobody watched, as they are saved: by nbclient, and by papermill on Kaggle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests import saved
from tests.drivers.kernel import ROOT
from tpunb.runs.directory import list_runs

pytestmark = pytest.mark.usefixtures("lent")  # whole notebooks that print much

# Kaggle's batch runs are papermill, and its image has this variable.
KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
WAYS = {
    "nbclient": ("-m nbconvert --to notebook --execute in.ipynb --output out.ipynb", {}),
    "papermill": ("-m papermill --log-output --autosave-cell-every 1 in.ipynb out.ipynb", KAGGLE),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_100000_lines_leaves_a_small_notebook(way: str, tmp_path: Path) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [v4.new_code_cell(source) for source in saved.CELLS]
    nbformat.write(
        v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "in.ipynb"
    )
    words, given = WAYS[way]
    env = {name: value for name, value in os.environ.items() if name[:4] != "JPY_"}
    env |= {"PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")} | given
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    saved.check(tmp_path / "out.ipynb")

    [run] = list_runs(tmp_path / "runs")
    lines = [line for line in run.log.read_text().splitlines() if line.endswith(" of many")]
    assert len(lines) == saved.LINES * saved.RANKS
