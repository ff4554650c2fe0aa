"""With one rank, rehearsal does what torch_xla's own functions do with one replica.

What those do on XLA's CPU with one replica is what they do on a TPU, but for the data of others:
shapes, types, views, gradients, counters, and what they refuse.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.drivers.lazy import met, torch_xla
from tests.drivers.ranks import Ranks, rehearse


def _seen(tensor: Any) -> list[Any]:
    value = tensor.detach().cpu()
    return [str(value.dtype), list(value.shape), value.tolist(), tensor.requires_grad]


def in_place(rehearsed: bool) -> dict[str, Any]:
    if rehearsed:
        rehearse()

    xlac, device = torch_xla._XLAC, torch_xla.device()
    found: dict[str, Any] = {}

    def double(*tensors: Any) -> None:
        xlac._xla_all_reduce_inplace("sum", list(tensors), 2.0, [], False)

    def tell(name: str, *tensors: Any) -> None:
        found[name] = [_seen(tensor) for tensor in tensors]

    def ones(*shape: int, **options: Any) -> Any:
        return torch.ones(*shape, device=device, **options)

    base = ones(4)
    view = base[1:3]
    double(view)
    tell("a view", view, base)
    base.add_(1)
    tell("a view, after its base has changed", view, base)

    base = ones(4)
    view = base[1:3]
    double(base)
    tell("what has a view", base, view)
    view.add_(1)
    tell("what has a view, after that has changed", base, view)

    base = ones(4)
    view = base[1:3]
    view.add_(5)
    double(base)
    tell("what was changed by a view", base, view)

    base = ones(4)
    view = base[1:3]
    base.add_(5)
    double(view)
    tell("a view of what was changed", base, view)

    base = ones(4)
    double(base, base[1:3], base)
    tell("twice", base)

    number, turned = ones(3)[1], torch.arange(6.0, device=device).view(2, 3).t()
    wide, empty = ones(1).expand(3), ones(0, 3)
    double(number, turned, wide, empty)
    tell("layouts", number, turned, wide, empty)

    leaf = ones(2, requires_grad=True)
    version = leaf._version
    double(leaf)
    found["version"] = leaf._version - version
    tell("a leaf", leaf)
    (leaf * 3).sum().backward()
    double(leaf.grad.data)
    tell("a gradient", leaf.grad)
    return found


def outputs(rehearsed: bool) -> dict[str, Any]:
    if rehearsed:
        rehearse()

    xlac, device = torch_xla._XLAC, torch_xla.device()
    found: dict[str, Any] = {}
    x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
    ways: dict[str, Callable[[Any, Any], Any]] = {
        "gather": lambda out, t: xlac._xla_all_gather_out(out, x, t, 0, 1, [], False),
        "gathers": lambda out, t: xlac._xla_all_gather_coalesced_out(
            [out, out.clone()], [x, x], t, 0, 1, [], False
        ),
        "scatter": lambda out, t: xlac._xla_reduce_scatter_out(
            "sum", out, x, t, 2.0, 0, 1, [], False
        ),
        "scatters": lambda out, t: xlac._xla_reduce_scatter_coalesced_out(
            "max", [out, out.clone()], [x, x], t, 1.0, 1, 1, [], False
        ),
    }
    for name, way in ways.items():
        base = torch.zeros(4, 3, device=device)
        other = torch.zeros(5, device=device)
        small = torch.zeros(2, 3, dtype=torch.bfloat16, device=device)
        leaf = torch.zeros(2, 3, device=device, requires_grad=True)
        for out in (base[1:3], other, small, leaf):
            token = xlac._get_all_reduce_token(str(device))
            assert type(way(out, token)) is type(token)
            found.setdefault(name, []).append(_seen(out))
        found[name].append(_seen(base))
    return found


class Calls:
    """torch_xla's functions, with the arguments that all calls below have."""

    def __init__(self, rehearsed: bool) -> None:
        if rehearsed:
            rehearse()

        self.xlac: Any = torch_xla._XLAC
        self.device = torch_xla.device()
        self.functional = torch.ops._c10d_functional
        self.x = torch.arange(6.0, device=self.device).view(2, 3).requires_grad_()

    @property
    def token(self) -> Any:
        return self.xlac._get_all_reduce_token(str(self.device))

    def reduce(self, kind: str, x: Any, scale: float = 1.0) -> Any:
        return self.xlac._xla_all_reduce(kind, x, scale, [], False)

    def gather(self, x: Any, dim: int, groups: Any = ()) -> Any:
        return self.xlac._xla_all_gather(x, dim, 1, list(groups), False, None, None)

    def gathers(self, *tensors: Any) -> Any:
        return self.xlac._xla_all_gather_coalesced(list(tensors), self.token, 0, 1, [], False)

    def scatter(self, kind: str, x: Any, scale: float, dim: int, count: int = 1) -> Any:
        options = (scale, dim, count, [], False, None, None)
        return self.xlac._xla_reduce_scatter(kind, x, self.token, *options)

    def to_all(self, x: Any, from_dim: int, to_dim: int, count: int = 1) -> Any:
        return self.xlac._xla_all_to_all(x, self.token, from_dim, to_dim, count, [], False)

    def permute(self, x: Any, *pairs: list[int]) -> Any:
        return self.xlac._xla_collective_permute(x, self.token, list(pairs))

    def end(self) -> None:
        """Pinned and unpinned layouts may not be in one program."""
        self.xlac._set_all_reduce_token(str(self.device), None)


def results(rehearsed: bool) -> dict[str, Any]:
    c = Calls(rehearsed)

    found: dict[str, Any] = {}
    x, functional = c.x, c.functional
    bits = torch.tensor([True, False], device=c.device)
    calls: dict[str, Callable[[], Any]] = {
        "reduce": lambda: c.reduce("sum", x, 3.0),
        "reduce bool": lambda: c.reduce("sum", bits, 0.5),
        "reduce integers": lambda: c.reduce("sum", x.detach().long(), 0.5),
        "reduce f64": lambda: c.reduce("sum", x.double(), 1 / 3),
        "reduce bf16": lambda: c.reduce("sum", x.bfloat16(), 1 / 3),
        "reduce complex": lambda: c.reduce("sum", x.detach().to(torch.complex64), 2.0),
        "gather": lambda: c.gather(x, 1),
        "gathers": lambda: c.gathers(x, x + 1),
        "gather an empty second": lambda: c.gathers(x, x[:0]),
        "scatter": lambda: c.scatter("sum", x, 0.5, 0),
        "scatters": lambda: c.xlac._xla_reduce_scatter_coalesced(
            "min", [x, x.long()], c.token, 1.0, 0, 1, [], False
        ),
        "to all": lambda: c.to_all(x, 0, 1),
        "permute to itself": lambda: c.permute(x, [0, 0]),
        "permute nothing": lambda: c.permute(x),
        "functional reduce": lambda: functional.all_reduce(x, "sum", ""),
        "functional gather": lambda: functional.all_gather_into_tensor(x, 1, ""),
        "functional scatter": lambda: functional.reduce_scatter_tensor(x, "sum", 1, ""),
        "functional to all": lambda: functional.all_to_all_single(x, [], [], ""),
        "functional to all, shares": lambda: functional.all_to_all_single(x, [2], [2], ""),
    }
    for name, call in calls.items():
        met.clear_all()
        result = call()
        several = result if isinstance(result, (tuple, list)) else [result]
        kinds = [type(one).__name__ for one in several]
        counters = [counter for counter in met.counter_names() if counter in COUNTERS]
        seen = [_seen(one) for one in several if isinstance(one, torch.Tensor)]
        found[name] = [seen, kinds, counters]
        c.end()
    return found


def refusals(rehearsed: bool) -> dict[str, Any]:
    c = Calls(rehearsed)

    x, functional = c.x, c.functional
    calls: dict[str, Callable[[], Any]] = {
        "gather dim -1": lambda: c.gather(x, -1),
        "gather dim 2": lambda: c.gather(x, 2),
        "gather a number": lambda: c.gather(x.sum(), 0),
        "gather nothing": lambda: c.gather(x[:0], 0),
        "gather an empty first": lambda: c.gathers(x[:0], x),
        "scatter dim -1": lambda: c.scatter("sum", x, 1.0, -1),
        "scatter nothing": lambda: c.scatter("sum", x[:0], 1.0, 0),
        "scatter without a share": lambda: c.scatter("sum", x, 1.0, 0, 3),
        "scatter no such type": lambda: c.scatter("avg", x, 1.0, 0),
        "and of floats": lambda: c.reduce("and", x),
        "no such type": lambda: c.reduce("avg", x),
        "a CPU tensor": lambda: c.reduce("sum", torch.ones(2)),
        "to all from dim -1": lambda: c.to_all(x, -1, 0),
        "to all without a share": lambda: c.to_all(x, 1, 0, 2),
        "to all of nothing": lambda: c.to_all(x[:0], 0, 0),
        "permute nothing at all": lambda: c.permute(x[:0], [0, 0]),
        "permute twice": lambda: c.permute(x, [0, 0], [0, 0]),
        "an empty group": lambda: c.gather(x, 0, [[0], []]),
        "group of another": lambda: c.gather(x, 0, [[1]]),
        "functional to all, uneven": lambda: functional.all_to_all_single(x, [1], [2], ""),
        "functional no such type": lambda: functional.all_reduce(x, "avg", ""),
        "functional gather a number": lambda: functional.all_gather_into_tensor(x.sum(), 1, ""),
    }
    found = {}
    for name, call in calls.items():
        try:
            result = call()
            # Upstream's compiler checks this later.
            (result if isinstance(result, torch.Tensor) else result[0]).detach().cpu()
            found[name] = "accepted"
        except (RuntimeError, ValueError):
            found[name] = "refused"
        c.end()
    return found


COUNTERS = [
    f"xla::{name}"
    for name in (
        "AllReduce AllReduceInPlace AllGather AllGatherOut ReduceScatter ReduceScatterOut "
        "AllToAll all_reduce all_gather_into_tensor reduce_scatter_tensor all_to_all_single"
    ).split()
]


@pytest.mark.parametrize("calls", [in_place, outputs, results, refusals])
def test_rehearsal_with_one_rank_equals_torch_xla(
    ranks: Ranks, calls: Callable[[bool], Any]
) -> None:
    ((upstream,), (rehearsed,)) = (ranks.values(calls, 1, on) for on in (False, True))
    assert len(upstream) > 3
    for name, value in upstream.items():
        assert rehearsed[name] == value, name


def grads_without_all_reduce(gradient_as_bucket_view: bool) -> list[bool]:
    """For upstream's own functions: True for each gradient whose program lacks the all-reduce."""
    os.environ["XLA_ALWAYS_ALLREDUCE"] = "1"  # else it is left out where there is one replica
    import torch_xla.distributed.xla_backend

    dist.init_process_group("xla", init_method="xla://")
    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1))
    parallel = DistributedDataParallel(
        model.to(device), gradient_as_bucket_view=gradient_as_bucket_view
    )
    torch_xla.sync()
    parallel(torch.ones(4, 3, device=device)).sum().backward()
    text = torch_xla._XLAC._get_xla_tensors_text
    return ["cross_replica_sum" not in text([p.grad]) for p in model.parameters()]


def rehearsed_grads(gradient_as_bucket_view: bool) -> list[Any]:
    rank, _ = rehearse()
    dist.init_process_group("xla", init_method="xla://")
    device = torch_xla.device()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1))
    with warnings.catch_warnings(record=True) as said:
        parallel = DistributedDataParallel(
            model.to(device), gradient_as_bucket_view=gradient_as_bucket_view
        )
    warned = any("gradient_as_bucket_view" in str(each.message) for each in said)
    assert warned == gradient_as_bucket_view
    parallel(torch.full((4, 3), rank + 1.0, device=device)).sum().backward()
    return [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("view", [True, False])
def test_ddp_loses_a_gradient_in_torch_xla_and_none_in_a_rehearsal(
    ranks: Ranks, view: bool
) -> None:
    """torch_xla 2.8, 2.9: with gradient_as_bucket_view, the last gradient of each bucket."""
    ((*lost,),) = ranks.values(grads_without_all_reduce, 1, view)
    assert lost == [view, False, False]
    one, other = ranks.values(rehearsed_grads, 2, view)
    assert one == other
