"""More of tests/xla/test_launchers.py, which takes longer."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.xla.test_launchers import LATER


@pytest.mark.usefixtures("starts_processes")
def test_in_a_kernel_libraries_may_be_imported_later_and_are_restored(tmp_path: Path) -> None:
    program = tmp_path / "kernel.py"
    program.write_text("import sys\n" + textwrap.dedent(LATER))
    env = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, program], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "nprocs=8 is ignored: 1 rank runs",
        "num_processes=8 is ignored: 1 rank runs",
    ]
