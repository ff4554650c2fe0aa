"""Each collective of torch_xla against numpy: shapes, types, groups, 2 to 8 ranks."""

from __future__ import annotations

import functools
import math
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse

Array = np.ndarray[Any, Any]
FLOATS = ["float32", "float64", "bfloat16", "float16"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]
TYPES = [*FLOATS, *INTEGERS, "bool"]
NUMPY_TYPES = {"bfloat16": np.float32, "float16": np.float32}
"""16-bit floats are reduced in 32 bits."""
REDUCTIONS = {
    "sum": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
LAYOUTS = ["plain", "turned", "strided", "expanded"]


# A plan is one call, as JSON. Every rank computes all ranks' inputs, and checks its own result.


@st.composite
def plans(draw: st.DrawFn, world: int) -> dict[str, Any]:
    """One call of a collective by all ranks."""
    operation = draw(st.sampled_from(sorted(OPERATIONS)))
    dtype = draw(st.sampled_from(TYPES))
    kinds = [k for k in REDUCTIONS if dtype not in FLOATS or k not in ("and", "or")]
    order = draw(st.permutations(range(world)))
    size = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    groups = [order[i : i + size] for i in range(0, world, size)]
    if operation == "all_reduce" and draw(st.booleans()):
        cut = draw(st.integers(1, world - 1))
        groups = [order[:cut], order[cut:]]
    ungrouped = operation.startswith("functional") or operation in ("permute", "broadcast")
    if ungrouped or draw(st.booleans()):
        groups = []
    least = 0 if operation in ("all_reduce", "functional_all_reduce", "broadcast") else 1
    shape = draw(st.lists(st.integers(least, 4), min_size=least, max_size=3))
    targets = draw(st.permutations(range(world)))
    return {
        "operation": operation,
        "dtype": dtype,
        "reduce": draw(st.sampled_from(kinds)),
        "scale": draw(st.sampled_from([1.0, 0.5, 3.0, 1 / 3])),
        "groups": groups,
        "shape": shape,
        "dim": draw(st.integers(0, max(0, len(shape) - 1))),
        "to_dim": draw(st.integers(0, max(0, len(shape) - 1))),
        "count": draw(st.integers(1, 3)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "pin": draw(st.booleans()),
        "pairs": [[s, t] for s, t in enumerate(targets) if draw(st.booleans())],
        "root": draw(st.integers(0, world - 1)),
        "seed": draw(st.integers(0, 999)),
    }


class Plan(SimpleNamespace):
    """A plan as one rank carries it out: its fields, `rank` and `world`."""

    def __init__(self, plan: dict[str, Any], rank: int, world: int) -> None:
        super().__init__(**plan, rank=rank, world=world)

        if self.operation.startswith("functional"):
            self.dim = 0
        everyone = list(range(world))
        self.group = next(group for group in self.groups or [everyone] if rank in group)
        self.groups = self.groups or None
        self.type = getattr(torch, self.dtype)
        self.device = torch_xla.device()
        self.options = {"groups": self.groups, "pin_layout": self.pin}

    def brought(self, rank: int, index: int = 0, *, shares: bool = False) -> Array:
        """The input of a rank: small whole numbers, so that every type holds results exactly.

        With `shares`, it can be split for the group.
        """
        shape = [*self.shape[:-1], *(size + index for size in self.shape[-1:])]
        if shares:
            shape[self.dim] *= len(self.group)
        random = np.random.default_rng([self.seed, rank, index])
        values = random.integers(0 if self.dtype == "uint8" else -2, 3, shape)
        return np.asarray(values).astype(NUMPY_TYPES.get(self.dtype, self.dtype))

    def tensor(self, index: int = 0, *, shares: bool = False) -> Any:
        """This rank's input, on the device, in the plan's layout."""

        value = torch.from_numpy(self.brought(self.rank, index, shares=shares)).to(self.type)
        if value.dim() and self.layout == "turned":
            return value.transpose(0, -1).contiguous().to(self.device).transpose(0, -1)
        if value.dim() and self.layout == "strided":
            wide = torch.stack([value, value], dim=1).flatten(0, 1)
            return wide.to(self.device)[::2]
        if self.layout == "expanded":
            return value.to(self.device).expand(2, *value.shape)[1]
        return value.to(self.device)

    def tensors(self, *, shares: bool = False) -> list[Any]:
        return [self.tensor(index, shares=shares) for index in range(self.count)]

    def reduced(self, index: int = 0, *, shares: bool = False) -> Array:
        everyone = [self.brought(rank, index, shares=shares) for rank in self.group]
        return functools.reduce(REDUCTIONS[self.reduce], everyone)

    def scaled(self, value: Array) -> Any:
        """The scale as a tensor: XLA casts it from float32 to the tensor's type first."""

        scale = torch.tensor(np.float32(self.scale)).to(self.type)
        return self.expected(value) if self.scale == 1.0 else self.expected(value) * scale

    def expected(self, value: Array) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)).to(self.type)

    def share(self, value: Array) -> Array:
        return np.split(value, len(self.group), self.dim)[self.group.index(self.rank)]

    def empty(self, value: Any) -> Any:
        """An output for a result."""
        return value.new_zeros(value.shape).to(self.device)


def _all_reduce(p: Plan) -> Any:
    tensors = p.tensors()
    single = xm.all_reduce(p.reduce, tensors[0], scale=p.scale, **p.options)
    assert xm.all_reduce(p.reduce, tensors, scale=p.scale, **p.options) is tensors
    expected = [p.scaled(p.reduced(index)) for index in range(p.count)]
    return [single, *tensors], [expected[0], *expected]


def _all_gather(p: Plan) -> Any:
    tensors = p.tensors()
    expected = [
        p.expected(np.concatenate([p.brought(rank, index) for rank in p.group], p.dim))
        for index in range(p.count)
    ]
    gather = functools.partial(xm.all_gather, groups=p.groups, pin_layout=False)
    single = xm.all_gather(tensors[0], p.dim, p.groups, pin_layout=p.pin)
    last = gather(tensors[0], p.dim - len(p.shape))
    output = p.empty(expected[0])
    assert gather(tensors[0], p.dim, output=output) is output
    several = gather(tensors, p.dim)
    outputs = [p.empty(value) for value in expected]
    if p.pin:
        # An output of another shape: torch_xla gives it the shape of the result.
        outputs = [torch.zeros(1, dtype=p.type, device=p.device) for _ in expected]
    gather(tensors, p.dim, output=outputs)
    buckets = xm.all_gather_bucketized(tensors, p.dim, p.groups, bucket_cap_mb=p.seed % 2)
    found = [single, last, output, *several, *outputs, *buckets]
    return found, [*[expected[0]] * 3, *expected * 3]


def _reduce_scatter(p: Plan) -> Any:
    tensors = p.tensors(shares=True)
    expected = [p.scaled(p.share(p.reduced(index, shares=True))) for index in range(p.count)]
    args = (p.scale, p.dim, len(p.group))
    single = xm.reduce_scatter(p.reduce, tensors[0], *args, **p.options)
    output, outputs = p.empty(expected[0]), [p.empty(value) for value in expected]
    xm.reduce_scatter(p.reduce, tensors[0], *args, **p.options, output=output)
    several = xm.reduce_scatter(p.reduce, tensors, *args, **p.options)
    xm.reduce_scatter(p.reduce, tensors, *args, **p.options, output=outputs)
    buckets = xm.reduce_scatter_bucketized(p.reduce, tensors, *args, **p.options)
    return [single, output, *several, *outputs, *buckets], [expected[0]] * 2 + expected * 3


def _all_to_all(p: Plan) -> Any:
    tensor = p.tensor(shares=True)
    found = xm.all_to_all(tensor, p.dim, p.to_dim, len(p.group), p.groups, p.pin)
    parts = [p.share(p.brought(rank, shares=True)) for rank in p.group]
    return [found], [p.expected(np.concatenate(parts, p.to_dim))]


def _permute(p: Plan) -> Any:
    found = xm.collective_permute(p.tensor(), p.pairs)
    sources = {target: source for source, target in p.pairs}
    sent = p.brought(sources.get(p.rank, p.rank))
    return [found], [p.expected(sent if p.rank in sources else np.zeros_like(sent))]


def _broadcast(p: Plan) -> Any:
    tensors = [tensor.clone() for tensor in p.tensors()]
    functional = torch.ops._c10d_functional.broadcast(tensors[0], p.root, "")
    xm.collective_broadcast(tensors, p.root, pin_layout=p.pin)
    expected = [p.expected(p.brought(p.root, index)) for index in range(p.count)]
    return [functional, *tensors], [expected[0], *expected]


def _functional_all_reduce(p: Plan) -> Any:
    found = torch.ops._c10d_functional.all_reduce(p.tensor(), p.reduce, "")
    return [found], [p.expected(p.reduced())]


def _functional_all_gather(p: Plan) -> Any:
    found = torch.ops._c10d_functional.all_gather_into_tensor(p.tensor(), p.world, "")
    return [found], [p.expected(np.concatenate([p.brought(rank) for rank in p.group]))]


def _functional_reduce_scatter(p: Plan) -> Any:
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor
    found = scatter(p.tensor(shares=True), p.reduce, p.world, "")
    return [found], [p.expected(p.share(p.reduced(shares=True)))]


def _functional_all_to_all(p: Plan) -> Any:
    sizes = [p.shape[0]] * p.world if p.pin else []
    found = torch.ops._c10d_functional.all_to_all_single(p.tensor(shares=True), sizes, sizes, "")
    parts = [p.share(p.brought(rank, shares=True)) for rank in p.group]
    return [found], [p.expected(np.concatenate(parts))]


OPERATIONS = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
    "broadcast": _broadcast,
    "functional_all_reduce": _functional_all_reduce,
    "functional_all_gather": _functional_all_gather,
    "functional_reduce_scatter": _functional_reduce_scatter,
    "functional_all_to_all": _functional_all_to_all,
}


def carried_out(todo: list[dict[str, Any]]) -> int:
    rank, world = rehearse()
    late = random.Random(rank)
    for plan in todo:
        if late.random() < 0.2:
            time.sleep(0.02 * late.random())
        found, expected = OPERATIONS[plan["operation"]](Plan(plan, rank, world))
        assert len(found) == len(expected) > 0
        for got, want in zip(found, expected, strict=True):
            value = got.detach().cpu()
            assert (value.shape, value.dtype) == (want.shape, want.dtype), plan
            assert got.shape == want.shape, plan
            assert torch.equal(value, want), (plan, value, want)
    return len(todo)


# Few starts of ranks, each for many calls: connecting takes longer than most of them.
@pytest.mark.parametrize(("world", "starts"), [(2, 4), (3, 2), (4, 3), (8, 1)])
def test_random_collectives_match_numpy(ranks: Ranks, world: int, starts: int) -> None:
    done: set[str] = set()

    @settings(
        max_examples=starts,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(plans(world), min_size=16, max_size=24))
    def check(todo: list[dict[str, Any]]) -> None:
        assert ranks.values(carried_out, world, todo) == [len(todo)] * world
        done.update(plan["operation"] for plan in todo)

    check()
    assert done


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_each_collective_with_each_type_matches_numpy(ranks: Ranks, operation: str) -> None:
    """Each collective with each type, in one start of ranks; the plans above are random."""
    todo = [
        {
            "operation": operation,
            "dtype": dtype,
            "reduce": "max" if number % 2 else "sum",
            "scale": 1.0,
            "groups": [],
            "shape": [2, 3],
            "dim": number % 2,
            "to_dim": 1,
            "count": 2,
            "layout": LAYOUTS[number % len(LAYOUTS)],
            "pin": number % 2 == 0,
            "pairs": [[0, 1], [1, 0]],
            "root": 1,
            "seed": number,
        }
        for number, dtype in enumerate(TYPES)
    ]
    assert ranks.values(carried_out, 2, todo) == [len(TYPES)] * 2


def extremes() -> dict[str, list[Any]]:
    rank, world = rehearse()

    def all_of(reduce_type: str, values: list[Any], dtype: torch.dtype) -> list[Any]:
        x = torch.tensor(values[rank], dtype=dtype, device=torch_xla.device())
        one = xm.all_reduce(reduce_type, x, groups=[list(range(world))]).tolist()
        both = torch.stack([x] * world)
        share = xm.reduce_scatter(reduce_type, both, 1.0, 0, world)[0].tolist()
        assert repr(share) == repr(one)
        return one

    nan, inf = math.nan, math.inf
    return {
        "nan is the least": all_of("min", [[nan, 1.0], [1.0, nan]], torch.float32),
        "and the greatest": all_of("max", [[nan, 1.0], [1.0, nan]], torch.bfloat16),
        "infinity": all_of("sum", [[inf, inf], [1.0, -inf]], torch.float32),
        "wraps": all_of("sum", [[100, -100], [100, -100]], torch.int8),
        "wraps more": all_of("sum", [[30000, -5], [30000, -5]], torch.int16),
        "overflows": all_of("sum", [[60000.0], [60000.0]], torch.float16),
        "complex": all_of("sum", [[1 + 2j], [3 - 1j]], torch.complex64),
        "product": all_of("mul", [[1 + 2j], [3 - 1j]], torch.complex64),
    }


def test_collectives_with_nan_infinity_and_overflow(ranks: Ranks) -> None:
    expected = {
        "nan is the least": [math.nan, math.nan],
        "and the greatest": [math.nan, math.nan],
        "infinity": [math.inf, math.nan],
        "wraps": [-56, 56],
        "wraps more": [-5536, -10],
        "overflows": [math.inf],
        "complex": [4 + 1j],
        "product": [5 + 5j],
    }
    for found in ranks.values(extremes, 2):
        assert repr(found) == repr(expected)
