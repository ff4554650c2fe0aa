"""A rehearsal answers torch_xla's queries about a TPU, so that torch_xla's own code runs."""

from __future__ import annotations

import pytest

from tests.support import Driver

AUTOCAST = """
import torch, torch_xla
import torch_xla.runtime as xr
from torch_xla.amp import autocast
x = torch.ones(2, 2, device=torch_xla.device())
with autocast(x.device):
    print((x @ x).dtype)
with torch_xla.amp.autocast(x.device, enabled=False):
    print((x @ x).dtype)
print(xr.get_master_ip(), torch_xla.amp.autocast_mode.xm.xla_device_hw("xla:0"))
"""
MANAGER = """
import os
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.experimental.distributed_checkpoint import CheckpointManager
dist.init_process_group("gloo", init_method="xla://")
model = torch.nn.Linear(2, 2).to("xla")
xm.broadcast_master_param(model)
wanted = [each.tolist() for each in model.state_dict().values()]
manager = CheckpointManager(os.environ["TPUNB_RUN"] + "/saved", save_interval=2)
assert [manager.save(step, {"model": model.state_dict()}) for step in (1, 2)] == [False, True]
with torch.no_grad():
    model.weight.zero_()
state = {"model": model.state_dict()}
manager.restore(2, state)
model.load_state_dict(state["model"])
assert [each.tolist() for each in model.state_dict().values()] == wanted
print(manager.all_steps())
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_autocast_and_the_master_s_address(driver: Driver, ranks: int) -> None:
    seen = driver.run([], AUTOCAST, ranks=ranks)
    assert seen.result.state == "succeeded", seen.log
    lines = [
        f"[{rank}] {line}"
        for rank in range(ranks)
        for line in ("torch.bfloat16", "torch.float32", "localhost TPU")
    ]
    assert sorted(line for line in seen.log if "err]" not in line) == sorted(lines)


def test_torch_xla_s_checkpoint_manager(driver: Driver) -> None:
    seen = driver.run([], MANAGER)
    assert seen.result.state == "succeeded", seen.log
    assert {"[0] [2]", "[1] [2]"} <= set(seen.log)
