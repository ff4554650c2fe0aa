"""Runs in torch_xla's SPMD mode: one process that drives all rehearsal cores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import Driver, Seen
from tpunb.runs.events import Output

CORES = 4
SETUP = """
import os, time
import numpy as np, torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import tpunb
from torch import nn
"""
MESH = """
xr.use_spmd()
cores = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(cores), (cores,), ('data',))
"""
MODEL = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to('xla')
xs.mark_sharding(model[0].weight, mesh, ('data', None))
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
features, labels = torch.randn(32, 6), torch.randint(0, 3, (32,))

def step():
    x = features.to('xla')
    xs.mark_sharding(x, mesh, ('data', None))
    loss = nn.functional.cross_entropy(model(x), labels.to('xla'))
    optimizer.zero_grad()
    loss.backward()
    xm.optimizer_step(optimizer)
    torch_xla.sync()
    return loss.detach()
"""


def spmd(driver: Driver, *train: str, cores: int = CORES, **values: Any) -> Seen:
    """Run a cell, made of pieces, as `%%tpu_train` runs one that uses SPMD."""
    env = {"CPU_NUM_DEVICES": str(cores)}
    return driver.run([SETUP], "\n".join(train), ranks=1, spmd=cores, env=env, **values)


def printed(seen: Seen) -> list[str]:
    """The cell's output, without XLA's line on GSPMD at each compilation."""
    text = "".join(o.text for o in seen.of(Output) if o.stream == "stdout")
    return text.splitlines()


def test_spmd_metrics_returns_and_checkpoints_are_unsharded(driver: Driver) -> None:
    seen = spmd(
        driver,
        MESH,
        MODEL,
        """
for number in range(3):
    loss = step()
    tpunb.log(number, loss=loss)
torch_xla.sync()
shard = xs.mark_sharding(torch.arange(8.).to('xla'), mesh, ('data',))
made, weight = shard * 2, model[0].weight
# Gradients of the wrapped tensors that mark_sharding returns are wrapped, too.
line = nn.Linear(1, 1).to('xla')
adam = torch.optim.Adam(line.parameters())
(line(shard.reshape(8, 1)) ** 2).mean().backward()
adam.step()
grad = line.weight.grad
tpunb.log(4, wrapped=made.sum())
tpunb.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'shard': shard,
            'made': made, 'tied': [weight, weight], 'grad': grad, 'adam': adam.state_dict()}, 3)
""",
        returns=("shard", "made", "weight", "loss", "grad", "model"),
    )
    assert seen.result.state == "succeeded", seen.result
    assert seen.result.returns_failed == {}
    values = seen.result.returns
    assert {name: type(value) for name, value in values.items() if name != "model"} == {
        "shard": torch.Tensor,
        "made": torch.Tensor,
        "weight": torch.nn.Parameter,
        "loss": torch.Tensor,
        "grad": torch.Tensor,
    }
    assert values["shard"].tolist() == list(range(8))
    assert values["made"].tolist() == list(range(0, 16, 2))
    assert values["weight"].shape == (8, 6)
    assert values["model"][0].weight.tolist() == values["weight"].tolist()
    logged = seen.result.metrics()["loss"].tolist()
    assert seen.result.metrics()["wrapped"].tolist()[-1] == 56
    assert logged[2] == pytest.approx(values["loss"].item())
    [file] = (seen.result.dir / "checkpoints").glob("*.pt")
    state = torch.load(file, weights_only=True)
    assert state["shard"].tolist() == list(range(8))
    assert type(state["made"]) is torch.Tensor
    assert torch.equal(state["model"]["0.weight"], values["weight"].detach())
    assert state["tied"][0].data_ptr() == state["tied"][1].data_ptr()
    moments = state["adam"]["state"][0]
    assert {name: type(value) for name, value in moments.items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq"), torch.Tensor
    )
    assert moments["exp_avg"].abs().sum() > 0


def test_a_backward_pass_on_the_cpu_leaves_spmd_open(driver: Driver) -> None:
    seen = spmd(
        driver,
        "w = torch.ones(2, requires_grad=True); w.sum().backward()",
        MESH,
        MODEL,
        "print(cores, step().item() > 0)",
    )
    assert printed(seen) == ["4 True"], seen.result


def test_use_spmd_after_a_device_is_an_error_that_says_so(driver: Driver) -> None:
    seen = spmd(driver, "device = torch_xla.device()\nxr.use_spmd()")
    failure = seen.result.failure
    assert failure is not None
    assert (failure.type, failure.cell, failure.line) == ("SpmdError", 2, 2)
    assert failure.message.startswith("xr.use_spmd() was called after an XLA device was used")


def test_spmd_run_that_never_calls_use_spmd_logs_a_note(driver: Driver) -> None:
    seen = spmd(driver, "print(torch.ones(2, device='xla').sum().item())")
    assert seen.result.state == "succeeded"
    assert printed(seen) == ["2.0"]
    assert any("SPMD was never switched on in this run" in line for line in seen.log)


def test_spmd_switched_on_in_the_prelude_of_several_ranks_names_the_cell(driver: Driver) -> None:
    seen = driver.run([SETUP, "exec('xr.use_spmd()')"], "print('never')")
    failure = seen.result.failure
    assert failure is not None
    assert failure.rank is None
    assert failure.message.startswith("cell [2] has switched SPMD on")
    assert not any("never" in line for line in seen.log)
