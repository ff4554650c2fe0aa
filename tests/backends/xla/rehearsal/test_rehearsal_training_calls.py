"""torch_xla's functions built on collectives: training, mesh_reduce, save, layouts in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.drivers.lazy import torch_xla, xf, xm
from tests.drivers.ranks import Ranks, rehearse

BATCH, STEPS = 16, 6
CLOSE = {"SGD": 1e-5, "AdamW": 1e-4, "batch norm": 1e-5, "accumulation": 1e-5, "autocast": 1e-2}
"""Relative tolerance of each loss and weight; a tenth of it is the absolute one.

A mean over more ranks is summed in another order, which AdamW amplifies; with bfloat16 autocast
each rank rounds the gradients of its own part of the batch to 8 bits.
"""


def trained(kind: str, rank: int, world: int) -> tuple[list[float], list[float]]:
    """The losses of the global batch, and all weights and running means."""
    torch.manual_seed(0)
    features, labels = torch.randn(BATCH, 6), torch.arange(BATCH) % 3
    torch.manual_seed(rank)
    device = torch_xla.device()
    layers: list[torch.nn.Module] = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    if kind == "batch norm":
        layers[1] = torch.nn.BatchNorm1d(8) if world == 1 else xf.SyncBatchNorm(8)
    model = torch.nn.Sequential(*layers).to(device)
    if world > 1:
        xm.broadcast_master_param(model)
    optimizer: torch.optim.Optimizer
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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
                loss = torch.nn.functional.cross_entropy(model(x[some]), y[some]) / parts
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


def all_trained() -> list[tuple[list[float], list[float]]]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world > 1:
        rehearse()
    return [trained(kind, rank, world) for kind in CLOSE]


def test_training_on_ranks_equals_one_process(ranks: Ranks) -> None:
    (alone,) = ranks.values(all_trained, 1)
    two, four = (ranks.values(all_trained, count) for count in (2, 4))
    for every in (two, four):
        assert all(one == every[0] for one in every)  # the same on all ranks, bit for bit
        for close, (losses, weights), (found, found_weights) in zip(
            CLOSE.values(), alone, every[0], strict=True
        ):
            assert losses[-1] < losses[0]
            assert found == pytest.approx(losses, rel=close)
            assert found_weights == pytest.approx(weights, rel=close, abs=close / 10)


def met(folder: str) -> dict[str, Any]:
    rank, world = rehearse()
    device = torch_xla.device()
    x = torch.ones(world, 2, device=device) * rank
    data = {"tensor": x[0], "list": [rank, "text"], "none": None}
    leaf = torch.ones(2, device=device, requires_grad=True)
    (xf.all_reduce(xm.REDUCE_SUM, leaf * rank) * (rank + 1)).sum().backward()
    found: dict[str, Any] = {
        "gradient": leaf.grad.tolist(),  # type: ignore[union-attr]
        "mean": float(xm.mesh_reduce("mean", float(rank), np.mean)),
        "trees": xm.mesh_reduce("trees", data, lambda every: [d["list"] for d in every]),
        "tensors": xm.mesh_reduce("x", x[0], lambda every: torch.stack(every).sum().item()),
        "payloads": xm.rendezvous("one", bytes([rank]) * rank),
        "ordinals": xm.rendezvous("all of them", bytes([rank]), list(range(world))),
        "empty": xm.rendezvous("two"),
        "called": xm.do_on_ordinals(lambda t: t.sum().item(), (x,), ordinals=(1,)),
    }
    # torch.load no longer reads NumPy values since torch 2.6, on a TPU as well.
    with pytest.raises(Exception, match="Weights only load failed"):
        xm.mesh_reduce("numpy", np.ones(2), np.mean)
    with pytest.raises(TypeError, match="`payload` must be bytes"):
        xm.rendezvous("three", "text")
    with pytest.raises(ValueError, match="Only global rendezvous"):
        xm.rendezvous("four", b"", [0])
    xm.save({"rank": x}, f"{folder}/each{rank}.pt", master_only=False)
    xm.save({"rank": x}, f"{folder}/one.pt", global_master=True)
    xm.rendezvous("saved")
    found["saved"] = sorted(os.listdir(folder))
    found["first"] = torch.load(f"{folder}/one.pt")["rank"].sum().item()
    return found


def test_mesh_reduce_rendezvous_ordinals_and_save(ranks: Ranks, tmp_path: Path) -> None:
    for rank, found in enumerate(ranks.values(met, 3, str(tmp_path))):
        assert found == {
            "gradient": [rank * (rank + 1.0)] * 2,  # of this rank's own use, as torch_xla's
            "mean": 1.0,
            "trees": [[0, "text"], [1, "text"], [2, "text"]],
            "tensors": 6.0,
            "payloads": [b"", b"\1", b"\2\2"],
            "ordinals": [b"\0", b"\1", b"\2"],
            "empty": [b"", b"", b""],
            "called": 6.0 if rank == 1 else None,
            "saved": ["each0.pt", "each1.pt", "each2.pt", "one.pt"],
            "first": 0.0,
        }


def mixed(between: str) -> list[str]:
    if between == "upstream":
        os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    else:
        rehearse()

    from tpunb.backends.rehearsal import errors

    said: list[str] = []
    errors.print_warning = said.append
    x = torch.ones(3, device=torch_xla.device()) * 2
    xm.all_gather(x)[0].item()
    if between == "sync":
        torch_xla.sync()
    try:
        xm.all_reduce("sum", [x], pin_layout=between == "the same")
        xm.all_reduce("sum", [x], pin_layout=between == "the same")
        x.tolist()
    except RuntimeError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("between", ["upstream", "item", "sync", "the same"])
def test_pin_layout_mismatch_within_one_step_is_explained(ranks: Ranks, between: str) -> None:
    first, *others = ranks.values(mixed, 1 if between == "upstream" else 2, between)
    assert others in ([], [[]])
    if between in ("sync", "the same"):
        assert first == []
        return
    (said,) = first
    assert "mix of layout constrained and unconstrained" in said
    if between == "item":
        assert "has pin_layout=False, but in the same step all_gather of" in said
        assert "has pin_layout=True. This works in a rehearsal" in said
        assert 'test_rehearsal_training_calls.py: xm.all_reduce("sum", [x], pin_layout' in said
