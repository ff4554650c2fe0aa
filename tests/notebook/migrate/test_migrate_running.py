"""Migrated code runs on torch_xla: on the CPU, in one process per test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.migrate.notebooks import migrated

DATA = """\
import os
import torch, torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
loader = DataLoader(data, batch_size=8)
facts = {}
def tell(**more):
    facts.update(more)
    with open('facts.json', 'w') as file:
        file.write(__import__('json').dumps(facts))
"""

LOOPS = """\
import torch_xla
import torch_xla_py.xla_model as xm
import torch_xla_py.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
def train_loop_fn(loader, model, optimizer):
    seen = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        with autocast(xm.xla_device()):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        xm.optimizer_step(optimizer)
        seen += len(targets)
    return seen
def _mp_fn(rank, flags):
    device = xm.xla_device()
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = 0
    for epoch in range(flags['epochs']):
        para_loader = pl.ParallelLoader(loader, [device])
        seen += train_loop_fn(para_loader.per_device_loader(device), model, optimizer)
    for batch in pl.ParallelLoader(loader, [device]).per_device_loader(device):
        seen += len(batch)
    xm.mark_step()
    xm.get_xla_supported_devices('TPU', 1)
    dtype = str(model.weight.dtype), (torch.ones(1, device=device) * 1.001).item() == 1
    tell(seen=seen, world=xm.xrt_world_size(), rank=xm.get_ordinal(0) + xm.get_local_ordinal(),
         bfloat16=dtype[1])
"""

START = """\
%%time
os.environ['XLA_USE_BF16'] = '1'
assert os.environ['COLAB_TPU_ADDR']
xmp.spawn(_mp_fn, args=({'epochs': 2},), nprocs=8, start_method='fork')
"""

REPLICAS = """\
devices = xm.get_xla_supported_devices(max_devices=8)
model_parallel = dp.DataParallel(lambda: nn.Linear(4, 2), device_ids=devices)
"""

DRIVEN = """\
def train_loop_fn(model, loader, device, context):
    optimizer = context.getattr_or('o', lambda: torch.optim.SGD(model.parameters(), lr=0.1))
    seen = 0
    for x, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        xm.optimizer_step(optimizer)
        seen += len(targets)
    return seen
mean = 0
for epoch in range(2):
    seen = model_parallel(train_loop_fn, loader)
    mean = sum(seen) / len(devices)
    tell(mean=mean, epoch=epoch)
print('done')
"""


def run(cells: list[str], folder: Path) -> dict[str, object]:
    text = "\n".join(cells).replace("%%time\n", "")
    (folder / "script.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "script.py"],
        cwd=folder,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    facts: dict[str, object] = json.loads((folder / "facts.json").read_text())
    return facts


@pytest.mark.parametrize(
    "change",
    [
        ("print('done')", "print(mean)"),  # read below
        ("for epoch", "print(devices)\nfor epoch"),  # the list itself is wanted
        ("model_parallel(train_loop_fn, loader)", "model_parallel(train_loop_fn, loader, 1)"),
        ("mean = 0", "mean = 0\nhandle = model_parallel"),
        ("mean = 0", "mean = 0\n!ls"),
        ("epoch=epoch)", "epoch=epoch, text='''a\nb''')"),
    ],
)
def test_data_parallel_that_others_depend_on_is_marked(change: tuple[str, str]) -> None:
    head = "import torch_xla.core.xla_model as xm\nimport torch_xla.distributed.data_parallel as dp"
    driven = DRIVEN.replace(*change)
    assert driven != DRIVEN
    _, made, after = migrated(head, REPLICAS, driven)
    assert "# tpunb migrate: It drives devices from threads of one process" in made
    assert after == driven
