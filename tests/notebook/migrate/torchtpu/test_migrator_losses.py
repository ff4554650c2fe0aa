"""Before the migration, the examples train with torch_xla on the CPU, in one process.

After it: tests/backends/torchtpu/test_torchtpu_migrated.py, with the same losses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.migrate.notebooks import migrated
from tests.notebook.migrate.torchtpu.examples import COMPLETE, LOSSES

RUN = """
import json, sys
import torch.distributed as dist
import torch_xla
torch_xla.launch = lambda fn, args=(), **others: fn(0, *args)
losses = {}
for name, cells in json.load(sys.stdin).items():
    names = {"__name__": "__main__"}
    for cell in cells:
        lines = (line for line in cell.split("\\n") if not line.startswith(("!", "%")))
        exec("\\n".join(lines), names)
    losses[name] = names["losses"]
    if dist.is_initialized():
        dist.destroy_process_group()
print(json.dumps(losses))
"""


@pytest.mark.usefixtures("starts_processes")
def test_the_examples_have_these_losses_with_torch_xla(tmp_path: Path) -> None:
    notebooks = {name: migrated(*cells) for name, cells in COMPLETE.items()}
    text = json.dumps(notebooks).replace('= \\"TPU\\"', '= \\"CPU\\"')  # PJRT_DEVICE
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=text,
        cwd=tmp_path,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses.keys() == LOSSES.keys()
    for name in COMPLETE:
        assert losses[name] == pytest.approx(LOSSES[name], abs=1e-5)
