"""A notebook with a train cell on Kaggle: its own client, its stand-in, which runs it for real.

Its ranks are plain Python (tests/fakes/torchless.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.drivers.kaggle import kaggle_project
from tests.drivers.places import tpunb

RANK = "import os\nprint('rank', os.environ['RANK'])"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("line", ["", "raise ValueError('no luck')"])
def test_runs_on_kaggle_are_in_the_fetched_output(tmp_path: Path, line: str) -> None:
    with kaggle_project(tmp_path) as kaggle:
        kaggle.without_torch()
        train = f"%%tpu_train --cores 2 --no-raise\n{RANK}\n{line}"
        cells = ["%load_ext tpunb", train]
        made = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells])
        nbformat.write(made, kaggle.folder / "train.ipynb")
        env = kaggle.environment()
        done = tpunb(kaggle.folder, env, "submit", "train.ipynb", "--on", "kaggle")
        assert done.returncode == bool(line), done.stdout + done.stderr
        assert "COMPLETE" in done.stdout
        assert ("ValueError: no luck" if line else "RunResult succeeded") in done.stdout
        [folder] = (kaggle.folder / "runs/kaggle").iterdir()
        logs = tpunb(kaggle.folder, env, "logs", "--runs", f"{folder}/runs")
        assert re.search(r"^\[\d\] rank \d$", logs.stdout, re.MULTILINE)
