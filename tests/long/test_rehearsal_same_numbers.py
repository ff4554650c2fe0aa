"""1, 2, 4 and 8 ranks on the same global batch give the same losses and weights.

How close: a mean over more ranks is summed in another order. In float32 that changes the last
digits, and AdamW, which divides small numbers by small ones, makes more of them; with bfloat16
autocast each rank rounds the gradients of its own part of the batch to 8 bits.
"""

from __future__ import annotations

import os

import pytest

from tests.drivers.ranks import Ranks, rehearse
from tests.support import Driver

BATCH, STEPS = 16, 10
CLOSE = {
    "SGD": 1e-5,
    "momentum": 1e-5,
    "AdamW": 1e-4,
    "batch norm": 1e-5,
    "accumulation": 1e-5,
    "autocast": 1e-2,
}
"""Relative tolerance of each loss and weight; a tenth of it is the absolute one."""


def trained(kind: str) -> tuple[list[float], list[float]]:
    """The losses of the global batch, and all weights and running means."""
    world = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    import torch
    import torch.nn.functional as F  # noqa: N812
    import torch_xla
    import torch_xla.core.functions as xf
    import torch_xla.core.xla_model as xm

    torch.manual_seed(0)
    features, labels = torch.randn(BATCH, 6), torch.arange(BATCH) % 3
    device = torch_xla.device()
    layers: list[torch.nn.Module] = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    if kind == "batch norm":
        layers[1] = torch.nn.BatchNorm1d(8) if world == 1 else xf.SyncBatchNorm(8)
    model = torch.nn.Sequential(*layers).to(device)
    optimizer: torch.optim.Optimizer
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    else:
        momentum = 0.0 if kind == "SGD" else 0.9
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    x, y = features[mine].to(device), labels[mine].to(device)
    parts = 2 if kind == "accumulation" else 1
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for part in range(parts):
            some = slice(part, None, parts)
            with torch.autocast("xla", torch.bfloat16, enabled=kind == "autocast"):
                loss = F.cross_entropy(model(x[some]), y[some]) / parts
            loss.backward()
            total += loss.detach()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        losses.append(total)
    mean = torch.stack(losses)
    if world > 1:
        mean = xm.all_reduce("sum", mean, scale=1 / world)
    kept = [p.detach() for p in model.parameters()]
    kept += [b for name, b in model.named_buffers() if name.endswith("mean")]
    return mean.tolist(), torch.cat([k.cpu().flatten() for k in kept]).tolist()


def all_trained(*kinds: str) -> list[tuple[list[float], list[float]]]:
    if os.environ["WORLD_SIZE"] != "1":
        rehearse()
    return [trained(kind) for kind in kinds]


@pytest.mark.parametrize(
    "kinds", [["SGD", "momentum", "AdamW", "accumulation"], ["batch norm", "autocast"]]
)
def test_rehearsal_losses_and_weights_equal_one_process(ranks: Ranks, kinds: list[str]) -> None:
    (alone,) = ranks.values(all_trained, 1, *kinds)
    for count in (2, 4, 8):
        every = ranks.values(all_trained, count, *kinds)
        assert all(one == every[0] for one in every)  # the same on all ranks, bit for bit
        for kind, (losses, weights), (found, found_weights) in zip(
            kinds, alone, every[0], strict=True
        ):
            assert losses[-1] < 0.9 * losses[0]  # it has learned
            assert found == pytest.approx(losses, rel=CLOSE[kind])
            close = CLOSE[kind]
            assert found_weights == pytest.approx(weights, rel=close, abs=close / 10)


DATA = "import torch\ntorch.manual_seed(5)\nfeatures, goal = torch.randn(16, 6), torch.randn(16, 1)"
RUN = """\
import os, torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
torch.manual_seed(1)
device, rank, world = torch_xla.device(), xr.global_ordinal(), xr.world_size()
model = torch.nn.Linear(6, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = (part[rank::world].to(device) for part in (features, goal))
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    xm.optimizer_step(optimizer)
    torch_xla.sync()
    losses.append(xm.mesh_reduce("loss", loss.item(), lambda every: sum(every) / len(every)))
"""


@pytest.mark.usefixtures("starts_processes")
def test_rehearsal_losses_in_real_runs_are_equal_for_all_core_counts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    driver = Driver(tmp_path_factory.mktemp("runs"))
    driver.warm()
    try:
        found = [
            driver.run([DATA], RUN, ranks=count, returns=("losses",)).result.returns["losses"]
            for count in (1, 2, 8)
        ]
    finally:
        driver.launcher.close()
    assert found[0][-1] < found[0][0]
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-5)
