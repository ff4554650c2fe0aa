"""The notebook whose loop has five faults: the report finds all, and none in the fixed loop."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.usefixtures("lent")  # a kernel and a training run

NAME = "10_one_core_debugging.ipynb"
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / NAME
FAULTS = {
    "no gradient at any step: model.extra.weight, model.extra.bias": "optimizer.step()",
    "recompiled at step 4 ": "if step == 3:",
    "recompiled at step 9 ": "x, y = x.to(device), y.to(device)",
    ".item() reads a value from the device, at every step": "total += loss.item()",
    "gradients are not reduced before this step": "optimizer.step()",
}


@pytest.mark.timeout(600)
def test_the_report_finds_each_fault(tmp_path: Path) -> None:
    shutil.copy(NOTEBOOK, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tpunb", "run", NAME, "out.ipynb"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    shown = [
        "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in c.outputs)
        for c in cells
        if c.cell_type == "code"
    ]
    before, after = (text for text in shown if "%%tpu_debug: " in text)
    found = re.findall(r"^\d\. (.*)\n +cell \[\d+\], line \d+: (.*)$", before, re.MULTILINE)
    assert len(found) == len(FAULTS), before
    for title, line in FAULTS.items():
        sources = [source for issue, source in found if issue.startswith(title)]
        assert sources == [line], before
    assert "no issues found" in after
    assert not re.search("lint:", "".join(shown)), shown
    assert re.search(r"\d+\.\d% of 1247 digits classified correctly", shown[-1])


def test_the_notebook_is_saved_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
