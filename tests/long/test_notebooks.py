"""The notebooks that demonstrate training helpers run to the end and print their figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

# Each test starts a kernel and a training run.
pytestmark = pytest.mark.usefixtures("lent")

ROOT = Path(__file__).parents[2] / "notebooks"
SHOWS = {
    "11_static_shapes": r"\d+ compilations became \d+, .* of 250 paragraphs classified correctly",
    "12_inference_on_all_cores": r"one core: .* 2 cores: (.|\n)* returned all 1797, in order",
    "13_big_batches": r"by hand +\d.*\nAccumulation +\d.* 8 +\d",
    "14_resume": r"not stopped: 0\.\d*[1-9]\d* with the weights alone, 0\.000 with everything",
}
"""Pattern of each notebook's last output: the figures before and after."""


@pytest.mark.timeout(600)  # a kernel and several runs, possibly on a busy machine
@pytest.mark.parametrize("name", SHOWS)
def test_a_notebook_runs_and_shows_its_figures(name: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / f"{name}.ipynb", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "run", f"{name}.ipynb", "out.ipynb", "--cores", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    # The text may be split into several outputs.
    printed = "".join("".join(o.get("text", "")) for cell in cells for o in cell.get("outputs", ()))
    assert re.search(SHOWS[name], printed), printed
    assert "lint:" not in printed


@pytest.mark.timeout(900)  # several runs
def test_sweep_notebook_with_a_grid(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sweeps", tmp_path / "sweeps")
    text = (ROOT / "15_sweep.ipynb").read_text()
    assert text.count("[0.01, 0.1, 0.5]") == text.count("[16, 64]") == 1
    text = text.replace("[0.01, 0.1, 0.5]", "[0.1, 0.5]").replace("[16, 64]", "[16]")
    (tmp_path / "15_sweep.ipynb").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "run", "15_sweep.ipynb", "out.ipynb"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("succeeded on 2 rehearsal cores") == 4
    cells = nbformat.read(tmp_path / "out.ipynb", 4).cells
    table, figure, last = [cell.outputs[-1] for cell in cells[2:]]
    assert "4 trials: 4 complete" in table.data["text/plain"]
    assert "<table>" in table.data["text/html"]
    assert figure.data["image/png"]
    assert re.fullmatch(r"4 trials; best: .* accuracy 0\.9\d+\n", last.text)


@pytest.mark.parametrize("name", [*SHOWS, "15_sweep", "sweeps/digits"])
def test_a_notebook_is_saved_without_outputs(name: str) -> None:
    cells = json.loads((ROOT / f"{name}.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
