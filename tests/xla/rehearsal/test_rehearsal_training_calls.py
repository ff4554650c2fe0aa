"""torch_xla's functions built on collectives: optimizer steps, gradients, BatchNorm, rendezvous."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.drivers.ranks import Ranks, rehearse


def stepped() -> dict[str, Any]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    def weights(groups: Any = None, **options: Any) -> list[float]:
        """After a step of size 1 down a gradient of 1, 2, … and of which the mean is taken."""
        parameters = [
            torch.zeros(300, 300, device=torch_xla.device(), requires_grad=True) for _ in range(4)
        ]
        for number, parameter in enumerate(parameters):
            (parameter * (number + 1) * (rank + 1)).sum().backward()
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        xm.optimizer_step(optimizer, groups=groups, **options)
        return [parameter.mean().item() for parameter in parameters]

    found = {"all": weights(), "barrier": weights(barrier=True, pin_layout=False)}
    found["groups"] = weights([[0, 1], [2, 3]])
    os.environ["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = "1"  # 3 parameters of 0.36 MB, and 1
    found["buckets"] = weights()
    return found


def test_optimizer_step(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.values(stepped, 4)):
        mean = [-2.5, -5.0, -7.5, -10.0]
        assert found["all"] == found["barrier"] == found["buckets"] == mean
        # Upstream divides by the number of all ranks, also within groups.
        share = (1 + 2 if rank < 2 else 3 + 4) / 4
        assert found["groups"] == [-share * number for number in (1, 2, 3, 4)]


def differentiated() -> dict[str, Any]:
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.functions as xf
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()

    def grad(function: Callable[[Any], Any], values: list[list[float]]) -> list[Any]:
        x = torch.tensor(values[rank], device=device, requires_grad=True)
        y = function(x)
        (y * torch.arange(1.0, y.numel() + 1, device=device)).sum().backward()
        assert x.grad is not None
        return [y.tolist(), x.grad.tolist()]

    values = [[1.0, 5.0], [2.0, 4.0]]
    found = {
        "sum": grad(lambda x: xf.all_reduce(xm.REDUCE_SUM, x), values),
        "scaled": grad(lambda x: xf.all_reduce(xm.REDUCE_SUM, x, scale=0.5), values),
        "product": grad(lambda x: xf.all_reduce(xm.REDUCE_MUL, x), values),
        "least": grad(lambda x: xf.all_reduce(xm.REDUCE_MIN, x), values),
        "greatest": grad(lambda x: xf.all_reduce(xm.REDUCE_MAX, x), values),
        "gather": grad(xf.all_gather, values),
    }
    torch.manual_seed(0)
    weight, inputs = torch.randn(3, 2 * world), torch.randn(2 * world, 4)
    # Each rank has two columns of the weight; the input's columns are shared among the ranks.
    part = weight[:, 2 * rank : 2 * rank + 2].to(device).requires_grad_()
    own = inputs[:, 2 * rank : 2 * rank + 2].to(device)
    for split in (1, 2):
        product = xf.distributed_mm(part, own, split=split)
        whole = (weight @ inputs)[:, 2 * rank : 2 * rank + 2]
        assert torch.allclose(product.detach().cpu(), whole, atol=1e-5)
    product.sum().backward()
    assert part.grad is not None
    return found


def test_collective_functions_with_gradients(ranks: Ranks) -> None:
    one, other = ranks.values(differentiated, 2)
    for name, value, gradients in (
        ("sum", [3.0, 9.0], ([1.0, 2.0], [1.0, 2.0])),
        ("scaled", [1.5, 4.5], ([0.5, 1.0], [0.5, 1.0])),
        ("product", [2.0, 20.0], ([2.0, 8.0], [1.0, 10.0])),
        ("least", [1.0, 4.0], ([1.0, 0.0], [0.0, 2.0])),
        ("greatest", [2.0, 5.0], ([0.0, 2.0], [1.0, 0.0])),
        # torch_xla's gradient covers only this rank's use of its own part.
        ("gather", [1.0, 5.0, 2.0, 4.0], ([1.0, 2.0], [3.0, 4.0])),
    ):
        assert one[name] == [value, gradients[0]], name
        assert other[name] == [value, gradients[1]], name


def normalized(kind: str) -> list[Any]:
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.functions as xf
    import torch_xla.core.xla_model as xm

    torch.manual_seed(0)
    shape = {"1d": (4 * world, 3), "2d": (2 * world, 3, 2, 2), "3d": (world, 3, 2, 2, 2)}[kind]
    batch, weights = torch.randn(shape), torch.randn(shape)
    own = slice(rank * shape[0] // world, (rank + 1) * shape[0] // world)
    norm = xf.SyncBatchNorm(3).to(torch_xla.device())
    x = batch[own].to(torch_xla.device()).requires_grad_()
    y = norm(x)
    (y * weights[own].to(torch_xla.device())).sum().backward()
    xm.all_reduce("sum", [norm.weight.grad, norm.bias.grad])

    plain = {"1d": torch.nn.BatchNorm1d, "2d": torch.nn.BatchNorm2d, "3d": torch.nn.BatchNorm3d}
    whole = plain[kind](3)
    z = batch.clone().requires_grad_()
    result = whole(z)
    (result * weights).sum().backward()
    assert z.grad is not None
    assert x.grad is not None
    found = [(y, result[own]), (x.grad, z.grad[own]), (norm.running_mean, whole.running_mean)]
    found += [(norm.weight.grad, whole.weight.grad), (norm.bias.grad, whole.bias.grad)]
    return [(a.detach().cpu() - b.detach()).abs().max().item() for a, b in found]


@pytest.mark.parametrize("kind", ["1d", "2d", "3d"])
def test_batch_norm_of_several_ranks_is_that_of_one(ranks: Ranks, kind: str) -> None:
    for differences in ranks.values(normalized, 3, kind):
        assert max(differences) < 2e-5


def met(folder: str) -> dict[str, Any]:
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    ran: list[str] = []
    xm.add_step_closure(ran.append, args=("closure",))
    x = torch.ones(world, 2, device=device) * rank
    token = torch_xla._XLAC._get_all_reduce_token(str(device))
    xm.all_gather([x], pin_layout=False)
    xm.reduce_scatter("sum", x, 1.0, 0, world)
    xm.all_to_all(x, 0, 0, world)
    xm.collective_permute(x, [[0, 1]])
    assert not ran, "a step closure ran in the middle of a step"
    torch_xla._XLAC._set_all_reduce_token(str(device), token)
    data = {"tensor": x[0], "list": [rank, "text"], "none": None}
    found: dict[str, Any] = {
        "mean": float(xm.mesh_reduce("mean", float(rank), np.mean)),
        "numbers": xm.mesh_reduce("numbers", rank, list),
        "trees": xm.mesh_reduce("trees", data, lambda every: [d["list"] for d in every]),
        "tensors": xm.mesh_reduce("x", x[0], lambda every: torch.stack(every).sum().item()),
        "ordinals": xm.rendezvous("all of them", bytes([rank]), list(range(world))),
        "closures": list(ran),  # a rendezvous ends the step, as upstream's does
    }
    # torch.load no longer reads NumPy values since torch 2.6, on a TPU as well.
    for value in (np.float64(rank), np.ones(2)):
        with pytest.raises(Exception, match="Weights only load failed"):
            xm.mesh_reduce("numpy", value, np.mean)
    called = xm.do_on_ordinals(lambda t: t.sum().item(), (x,), ordinals=(1,))
    found["called"] = called
    xm.save({"rank": x}, f"{folder}/each{rank}.pt", master_only=False)
    xm.save({"rank": x}, f"{folder}/one.pt", global_master=True)
    xm.rendezvous("saved")
    found["saved"] = sorted(os.listdir(folder))
    found["first"] = torch.load(f"{folder}/one.pt")["rank"].sum().item()
    return found


def test_mesh_reduce_ordinals_closures_and_save(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.values(met, 3, str(tmp_path))
    for rank, one in enumerate(found):
        assert one == {
            "mean": 1.0,
            "numbers": [0, 1, 2],
            "trees": [[0, "text"], [1, "text"], [2, "text"]],
            "tensors": 6.0,
            "ordinals": [b"\0", b"\1", b"\2"],
            "closures": ["closure"],
            "called": 6.0 if rank == 1 else None,
            "saved": ["each0.pt", "each1.pt", "each2.pt", "one.pt"],
            "first": 0.0,
        }


def disagreeing(which: str) -> list[str]:
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal.errors import MismatchError

    device = torch_xla.device()
    x = torch.ones(4, 4, device=device)
    odd = torch.ones(4, 4 + rank, device=device)
    functional = torch.ops._c10d_functional
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: xm.all_gather(odd, dim=rank),
        "gathers": lambda: xm.all_gather([x, odd], pin_layout=False),
        "scatter": lambda: xm.reduce_scatter("sum", x, 1.0 + rank, 0, world),
        "scatter, one wrong": lambda: xm.reduce_scatter("sum", x[rank:], 1.0, 0, world),
        "to all": lambda: xm.all_to_all(x, rank, 0, world),
        "permute": lambda: xm.collective_permute(odd, [[0, 1], [1, 0]]),
        "functional": lambda: functional.reduce_scatter_tensor(x, "max" if rank else "min", 2, ""),
    }
    with pytest.raises(MismatchError) as raised:
        calls[which]()
    # The ranks still agree.
    assert xm.all_reduce("sum", torch.ones(1, device=device)).item() == world
    return [str(raised.value)]


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("gather", [r"rank 0: all_gather of float32\[4, 4\], dim 0", r"float32\[4, 5\], dim 1"]),
        ("gathers", [r"rank 0: all_gather of 2 tensors .*tensor 2 is float32\[4, 4\]"]),
        ("scatter", [r"rank 1: reduce_scatter sum of .*, dim 0, scale 2"]),
        ("scatter, one wrong", [r"rank 1: reduce_scatter sum of float32\[3, 4\]"]),
        ("to all", [r"rank 1: all_to_all of float32\[4, 4\], from dim 1 to 0"]),
        (
            "permute",
            [r"rank 1: collective_permute of float32\[4, 5\], pairs \[\[0, 1\], \[1, 0\]\]"],
        ),
        ("functional", [r"rank 0: reduce_scatter min", r"rank 1: reduce_scatter max"]),
    ],
)
def test_mismatch_in_any_collective_is_reported(ranks: Ranks, which: str, said: list[str]) -> None:
    for (message,) in ranks.values(disagreeing, 2, which):
        for text in said:
            assert re.search(text, message), message
        assert "test_rehearsal_training_calls.py" in message


def refused() -> dict[str, str]:
    _, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.ones(4, 4, device=torch_xla.device())
    whole = x.long()
    calls: dict[str, Callable[[], object]] = {
        "in one tensor of a type": lambda: xm.all_gather([x, whole], pin_layout=False),
        "in an empty list": lambda: xm.all_gather([], pin_layout=False),
        "in an empty tensor": lambda: xm.all_gather([x[:0]], pin_layout=False),
        "in shares": lambda: xm.reduce_scatter("sum", x[1:], 1.0, 0, world),
        "in a count of shares": lambda: xm.reduce_scatter("sum", x, 1.0, 0, 4),
        "in a split": lambda: xm.all_to_all(x, 0, 0, 4),
        "in a dimension": lambda: xm.all_to_all(x, -1, 0, world),
        "in pairs": lambda: xm.collective_permute(x, [[0, 1], [0, 0]]),
        "in ranks": lambda: xm.collective_permute(x, [[0, 2]]),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - looked at below
            call()
        found[name] = str(raised.value)
    assert xm.all_reduce("sum", x)[0, 0].item() == world
    return found


def test_collective_arguments_that_fail_on_a_tpu_are_explained(ranks: Ranks) -> None:
    for found in ranks.values(refused, 2):
        for name, said in (
            ("in one tensor of a type", "torch_xla crashes if a list has a single tensor"),
            ("in an empty list", "torch_xla crashes with an empty list"),
            ("in an empty tensor", "torch_xla fails with an empty tensor in this call"),
            ("in shares", "dimension 0 of [3, 4] cannot be split into 2 equal shares"),
            ("in a count of shares", "shard_count is 4, but the group has 2 ranks"),
            ("in a split", "split_count is 4, but the group has 2 ranks"),
            ("in a dimension", "split_dimension -1 is not in 0 … 1"),
            ("in pairs", "XLA accepts each rank once as a source and once as a target"),
            ("in ranks", "only ranks 0 … 1 exist"),
        ):
            assert said in found[name], found[name]


def mixed(between: str) -> list[str]:
    if between == "upstream":
        os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"
    else:
        rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal import divergence

    said: list[str] = []
    divergence.print_warning = said.append
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
