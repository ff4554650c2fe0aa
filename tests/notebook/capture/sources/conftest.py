"""What the tests of sources share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.kernel import PATIENCE
from tests.notebook.capture.fronts import write
from tpunb.notebook.capture.sources import jupyter, kaggle


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers late has answered: other tests take this machine's time."""
    monkeypatch.setattr(jupyter, "WAIT", PATIENCE)
    monkeypatch.setattr(kaggle, "WAIT", PATIENCE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "kernels").mkdir()
    there = "import os, sys; '--cwd' not in sys.argv or os.chdir('kernels'); "
    for name in ("papermill", "papermill.py", "jupyter-nbconvert", "jupyter", "jupyter-lab"):
        (tmp_path / name).write_text(there + "print(flush=True); input()", encoding="utf-8")
    write(tmp_path / "in.ipynb", "a = 1", "b = 2")
    write(tmp_path / "out.ipynb", "a = 1", "# Parameters\na = 2", "b = 2")
    write(tmp_path / "other.ipynb", "a = 1")
    return tmp_path
