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
    "import os\nlocal_rank = int(os.environ['LOCAL_RANK'])\n!echo setup",
    """import tpunb, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
""",
    """%%tpu_train
mesh = init_device_mesh("{device}", (int(os.environ["WORLD_SIZE"]),))
layer = fully_shard(torch.nn.Linear(2, 2).to("{device}"), mesh=mesh)
layer(torch.ones(1, 2, device="{device}")).sum().backward()
assert layer.weight.grad.full_tensor().sum().item() == 4
""",
    """%%tpu_train
dist.init_process_group({group})
x = torch.ones(2, device="{device}") * (1 + dist.get_rank())
dist.all_reduce(x)
model = DistributedDataParallel(torch.nn.Linear(2, 1).to("{device}"))
model(x[None]).sum().backward()
print(f"sum {{x.sum().item()}} {{x.device.type}} {{local_rank}}" + chr(10), end="")
""",
]
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node=2".split()


def converted(folder: Path, group: str, device: str) -> Path:
    cells = [v4.new_code_cell(source.format(group=group, device=device)) for source in CELLS]
    nbformat.write(v4.new_notebook(cells=cells), folder / "nb.ipynb")
    run(folder, "-m", "tpunb", "convert", "nb.ipynb", "-o", "script.py")
    return folder / "script.py"


def run(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("sum"))


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    ("group", "device", "backend"),
    [
        ('"tpu_dist", device_id=torch.device("tpu:0")', "tpu", "torchtpu"),
        ('"gloo"', "cpu", "torch"),
    ],
)
def test_a_script_is_prepared_for_its_backend(
    tmp_path: Path, group: str, device: str, backend: str
) -> None:
    script = converted(tmp_path, group, device)
    assert f'backend="{backend}")' in script.read_text()
    assert run(tmp_path, "script.py") == [f"sum 2.0 {device} 0"]
    ranks = run(tmp_path, *TORCHRUN, "script.py")
    assert ranks == [f"sum 6.0 {device} {rank}" for rank in (0, 1)]
