"""More of tests/scenarios/test_debug_notebook.py, which takes longer."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.scenarios.test_debug_notebook import FAULTS, NAME, NOTEBOOK

pytestmark = pytest.mark.usefixtures("lent")  # a kernel and a training run


@pytest.mark.timeout(600)
def test_debug_report_finds_each_fault(tmp_path: Path) -> None:
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
