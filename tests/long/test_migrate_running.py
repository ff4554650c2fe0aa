"""More of tests/notebook/migrate/test_migrate_running.py, which takes longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.notebook.migrate.notebooks import migrated
from tests.notebook.migrate.test_migrate_running import DATA, DRIVEN, LOOPS, REPLICAS, START, run


@pytest.mark.usefixtures("starts_processes")
def test_a_notebook_of_2020_runs(tmp_path: Path) -> None:
    amp = "from torch_xla.amp import autocast"
    cells = migrated(DATA, amp, LOOPS, START)
    assert "MpDeviceLoader" in cells[2]
    assert run(cells, tmp_path) == {"seen": 72, "world": 1, "rank": 0, "bfloat16": False}


@pytest.mark.usefixtures("starts_processes")
def test_data_parallel_of_2019_runs_by_a_launch(tmp_path: Path) -> None:
    head = (
        "import torch_xla\nimport torch_xla_py.xla_model as xm\n"
        "import torch_xla_py.data_parallel as dp"
    )
    cells = migrated(DATA, head, REPLICAS, DRIVEN)
    assert "torch_xla.launch(_mp_fn, start_method='fork')\nprint('done')" in cells[3]
    assert run(cells, tmp_path) == {"mean": 32.0, "epoch": 1}
