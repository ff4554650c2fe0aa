"""`tpunb convert` of notebooks without torch_xla: the script alone, and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

CELLS = [
    "import torch, torch.distributed as dist",
    """%%tpu_train
import os
if "RANK" in os.environ:
    dist.init_process_group({group})
x = torch.ones(2, device="{device}") * (1 + int(os.environ.get("RANK", 0)))
if dist.is_initialized():
    dist.all_reduce(x)
print(f"sum {{x.sum().item()}} {{x.device.type}}" + chr(10), end="")
""",
]


def converted(folder: Path, group: str, device: str) -> Path:
    cells = [v4.new_code_cell(source.format(group=group, device=device)) for source in CELLS]
    nbformat.write(v4.new_notebook(cells=cells), folder / "nb.ipynb")
    run(folder, "-m", "tpunb", "convert", "nb.ipynb", "-o", "script.py")
    return folder / "script.py"


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    ("group", "device", "backend"), [('"tpu_dist"', "tpu", "torchtpu"), ('"gloo"', "cpu", "torch")]
)
def test_a_script_is_prepared_for_its_backend(
    tmp_path: Path, group: str, device: str, backend: str
) -> None:
    script = converted(tmp_path, group, device)
    assert f'_tpunb_standalone.prepare(backend="{backend}")' in script.read_text()
    assert run(tmp_path, "script.py").split("\n")[-2] == f"sum 2.0 {device}"
    launch = "-m torch.distributed.run --standalone --nproc-per-node=2".split()
    ranks = run(tmp_path, *launch, "script.py")
    assert ranks.count(f"sum 6.0 {device}") == 2
