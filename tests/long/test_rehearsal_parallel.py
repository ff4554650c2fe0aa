"""Libraries that train a model in parts: FSDP, ZeRO-1, distributed checkpoints.

Each is compared with plain torch on one CPU and the global batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse

STEPS, BATCH = 4, 3
"""BATCH is the batch size of one rank."""


def _model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Linear(40, 1)
    )


def _loss(model: Any, first: int, last: int, step: int, device: Any = "cpu") -> Any:
    """The mean over the rows `first` to `last` of a step's global batch."""
    x = torch.randn(4 * BATCH, 5, generator=torch.Generator().manual_seed(step))
    y = x.sin().sum(1, keepdim=True)
    own, wanted = x[first:last].to(device), y[first:last].to(device)
    return torch.nn.functional.mse_loss(model(own), wanted)


def _own_rows(rank: int) -> tuple[int, int]:
    return rank * BATCH, (rank + 1) * BATCH


def alone(world: int, optimizer: str, clip: float | None = None) -> list[float]:
    """The weights after training on one CPU."""
    torch.set_num_threads(1)
    model = _model()
    kind: Any = getattr(torch.optim, optimizer)
    steps = kind(model.parameters(), lr=0.05)
    for step in range(STEPS):
        steps.zero_grad()
        _loss(model, 0, world * BATCH, step).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        steps.step()
    return [value for p in model.parameters() for value in p.flatten().tolist()]


def _flat(state: dict[str, Any]) -> list[float]:
    return [value for tensor in state.values() for value in tensor.flatten().tolist()]


def fsdp(folder: str) -> dict[str, Any]:
    rank, world = rehearse()
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as Fsdp
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    device = torch_xla.device()
    model = _model()
    model[2] = Fsdp(model[2].to(device))
    model = Fsdp(model.to(device))
    held = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, *_own_rows(rank), step, device).backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()  # not xm.optimizer_step: gradients are reduced already
        torch_xla.sync()
    shard = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    prefix = f"{folder}/ckpt"
    xm.save(shard, f"{prefix}_rank-{rank:08d}-of-{world:08d}.pth", master_only=False)
    xm.rendezvous("saved")
    whole = None
    if rank == 0:
        state, _ = consolidate_sharded_model_checkpoints(prefix, save_model=False)
        whole = _flat({name: state[name] for name in _model().state_dict()})
    xm.rendezvous("consolidated")
    before = _loss(model, 0, BATCH, 99, device).item()
    loaded = torch.load(f"{prefix}_rank-{rank:08d}-of-{world:08d}.pth")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    after = _loss(model, 0, BATCH, 99, device).item()
    return {"held": held, "whole": whole, "before": before, "after": after}


def test_fsdp_trains_as_one_process_and_its_checkpoint_is_whole(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = ranks.values(fsdp, 2, str(tmp_path))
    expected = ranks.values(alone, 1, 2, "AdamW", 0.5)[0]
    assert found[0]["whole"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for own in found:
        assert own["held"] < len(expected)  # shards are padded to 128 numbers
        assert own["before"] == own["after"]


def zero(folder: str) -> tuple[list[float], int]:
    rank, world = rehearse()
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    device = torch_xla.device()
    model = _model().to(device)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.05, pin_layout=False, max_norm=0.5
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, *_own_rows(rank), step, device).backward()
        optimizer.step()  # reduces the gradients itself
        torch_xla.sync()
        if step == 1:  # its state goes through a file and back
            path = f"{folder}/{rank}-of-{world}.pt"
            xm.save(optimizer.state_dict(), path, master_only=False)
            optimizer.load_state_dict(torch.load(path))
    state = optimizer.base_optimizer.state.values()
    held = sum(entry["exp_avg"].numel() for entry in state)
    return _flat(model.state_dict()), held


def test_zero_1_trains_as_one_process(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.values(zero, 2, str(tmp_path))
    expected = ranks.values(alone, 1, 2, "AdamW", 0.5)[0]
    for weights, held in found:
        assert weights == found[0][0]
        assert weights == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert held < 0.7 * len(expected)


def checkpointed(backend: str, folder: str) -> list[Any]:
    rank, _ = rehearse()
    import torch.distributed.checkpoint as dcp

    dist.init_process_group(backend)
    gloo = None if backend == "gloo" else dist.new_group(backend="gloo")
    device = torch_xla.device()
    model = _model().to(device)
    before = _flat(model.state_dict())
    state = {
        "model": {name: value.cpu() for name, value in model.state_dict().items()},
        f"own/{rank}": torch.tensor([rank + 1.0], device=device),
        "epoch": 7,
    }
    dcp.save(state, checkpoint_id=folder, process_group=gloo)
    read = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        f"own/{rank}": torch.zeros(1, device=device),
        "epoch": 0,
    }
    dcp.load(read, checkpoint_id=folder, process_group=gloo)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(read["model"])
    return [_flat(model.state_dict()) == before, read[f"own/{rank}"].item(), read["epoch"]]


@pytest.mark.parametrize("backend", ["gloo", "xla"])
def test_a_distributed_checkpoint_of_all_ranks(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    found = ranks.values(checkpointed, 2, backend, str(tmp_path))
    assert found == [[True, 1.0, 7], [True, 2.0, 7]]
    assert {path.name for path in tmp_path.iterdir()} >= {".metadata", "__0_0.distcp"}
