"""More of tests/worker/test_recompiles.py, which takes longer."""

from __future__ import annotations

import re

import pytest

from tests.drivers.kernel import Kernel
from tests.worker.test_recompiles import nb

pytestmark = pytest.mark.usefixtures("lent")

CLEAN = """%%tpu_train --cores 2
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from torch.utils.data import DataLoader, TensorDataset
import tpunb
from tpunb.training import MaskedMean, shard
device = torch_xla.device()
model = torch.nn.Sequential(torch.nn.Linear(6, 2), torch.nn.Dropout(0.1)).to(device)
opt = torch.optim.AdamW(model.parameters(), 0.01)
plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)
data = TensorDataset(torch.randn(120, 6))
for epoch in range(4):
    for step, ((x,), mask) in enumerate(pl.MpDeviceLoader(shard(data, 8), device)):
        loss = model(x).square().mean() / 4
        loss.backward()
        if step % 4 == 3:
            xm.optimizer_step(opt)
            opt.zero_grad()
            plan.step()
        tpunb.log(loss=loss)
    mean = MaskedMean()
    with torch.no_grad():
        for (x,), mask in shard(data, 8):
            mean.add(model(x.to(device)).sum(1), mask.to(device))
            torch_xla.sync()
    print(mean.mean().item())
for step in range(30):
    loss = model(torch.randn(8, 6).to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    xm.optimizer_step(opt)
    torch_xla.sync()
    {read}
"""


def test_recompile_notes_of_a_uniform_run_only_mention_reads(
    nb: Kernel,
) -> None:
    quiet = nb.run(CLEAN.format(read="pass")).good()
    assert "ranks" not in quiet.stdout, quiet.stdout
    reading = nb.run(CLEAN.format(read="loss.item()")).good()
    [told] = set(re.findall(r"(?:rank \d|the ranks)[: ](.*)", reading.stdout))
    assert told.startswith(" a number is read from the device at every step"), reading.stdout
