"""The notebook whose loop has five faults: the report finds all, and none in the fixed loop."""

from __future__ import annotations

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


def test_debug_notebook_is_saved_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
