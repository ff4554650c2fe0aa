"""More of tests/training/checkpoint/test_api.py, which takes longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("outside_run")


@pytest.mark.usefixtures("starts_processes")
def test_saving_numbers_does_not_import_torch_xla(tmp_path: Path) -> None:
    code = (
        "import sys, tpunb; assert 'torch' not in sys.modules; assert tpunb.load() is None; "
        "assert 'torch' not in sys.modules; tpunb.save({'x': 1}, 1); "
        "assert 'torch_xla' not in sys.modules; print(tpunb.load().state)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'x': 1}\n"
