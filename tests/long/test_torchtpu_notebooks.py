"""The notebooks for TorchTPU and its benchmark run, and print the figures that they claim."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpunb.notebook.convert.stack import written_for

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOWS = {
    "torchtpu/00_quickstart": (
        "cores=2 epochs=8",
        r"trained a CNN of [\d,]+ weights .* on 2 rehearsal cores: accuracy 0\.9\d+",
    ),
    "models/llm_decoder_fsdp2": (
        "cores=2 fewer_cores=1 layers=1 steps=40",
        r"decoder with FSDP2 on 2 rehearsal cores, then on 1: "
        r"[2-4]\d\.\d% of the next bytes right, [34]\.\d+ bits for each; "
        r"losses within (0e\+00|\de-(0[5-9]|1\d)) of plain PyTorch",
    ),
}
"""Parameters that make the training smaller, and the pattern of the last line."""


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHOWS)
def test_torchtpu_notebook_reaches_its_claimed_result(name: str, tmp_path: Path) -> None:
    parameters, pattern = SHOWS[name]
    given = [word for pair in parameters.split() for word in ("-p", *pair.split("="))]
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "run", *given, NOTEBOOKS / f"{name}.ipynb", "out.ipynb"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert re.search(f"^{pattern}$", printed, re.MULTILINE), printed
    assert "lint:" not in printed
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_all_notebooks_for_torchtpu_are_run() -> None:
    sources = {
        str(path.relative_to(NOTEBOOKS).with_suffix("")): [
            "".join(cell["source"])
            for cell in json.loads(path.read_text())["cells"]
            if cell["cell_type"] == "code"
        ]
        for path in NOTEBOOKS.rglob("*.ipynb")
    }
    assert {name for name, cells in sources.items() if written_for(cells) == "torchtpu"} == {*SHOWS}


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.timeout(600)
def test_benchmark_of_torchtpu_prints_its_tables() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.torchtpu", "--quick"],
        cwd=NOTEBOOKS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    number = r"\d+\.\d+"
    rows = re.findall(rf"^.* {{2,}}{number} \({number}–{number}\).*$", done.stdout, re.MULTILINE)
    assert len(rows) == 7, done.stdout
