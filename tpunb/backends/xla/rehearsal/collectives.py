"""The collectives of a rehearsal: XLA tensor → CPU → gloo → XLA tensor.

Each function takes the arguments of the torch_xla function that it replaces (2.8, 2.9), so that
torch_xla's own Python code calls it unchanged. Calls that XLA's compiler or torch_xla refuses on a
TPU are refused in a rehearsal, too.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from tpunb.backends.rehearsal.buffers import as_bytes, flatten_values, join_values, memory
from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.errors import NotRehearsedError
from tpunb.backends.xla.rehearsal import process_groups
from tpunb.backends.xla.rehearsal.peers import (
    Groups,
    Peers,
    describe_call,
    group_by_type,
    increment_counter,
)
from tpunb.backends.xla.rehearsal.tensors import on_device, overwrite, read_values
from tpunb.utils.frame_locals import locals_of

Token = Any
"""Keeps torch_xla's collectives in order within a program. A rehearsal only passes it on."""
EMPTY = (
    "torch_xla fails with an empty tensor in this call ('Slice size at index 0 in gather op is out "
    "of range'), also on a TPU"
)
EMPTY_LIST = "torch_xla crashes with an empty list in this call, also on a TPU"

_all_gather_upstream: Callable[..., Any] = xm._all_gather_using_all_reduce
"""torch_xla's own all-gather for pinned layouts."""
_OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mul": torch.mul,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "min": torch.minimum,
    "max": torch.maximum,
}
"""XLA's semantics: min and max propagate NaN (gloo's do not), and bool is added with `or`."""
_FLOATS = (torch.float64, torch.float32, torch.complex64, torch.complex128)
_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
_REDUCED_AS = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    **{dtype: dtype for dtype in _FLOATS + _INTEGERS},
}
"""The type in which values are reduced. A TPU also reduces 16-bit floats in 32 bits."""


def _reduction_problem(call: RankCall, reduce_type: str, tensors: Sequence[torch.Tensor]) -> str:
    """Why XLA refuses this reduction, or ''. Raises NotRehearsedError for unsupported types."""
    if reduce_type not in _OPERATIONS:
        return f"there is no reduce type {reduce_type!r}"
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        if dtype not in _REDUCED_AS:
            raise NotRehearsedError(f"{call.operation} of {dtype}")
        if reduce_type in ("and", "or") and (dtype.is_floating_point or dtype.is_complex):
            return f"{reduce_type!r} needs bool or integer tensors"
        if reduce_type in ("min", "max") and dtype.is_complex:
            return f"complex numbers have no {reduce_type}"
    return ""


def _reduce(reduce_type: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce the parts in rank order. The result has the type `_REDUCED_AS`."""
    wide = (part.to(_REDUCED_AS[part.dtype]) for part in parts)
    return functools.reduce(_OPERATIONS[reduce_type], wide)


def _scale(value: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Cast a flat `value` to `dtype` and multiply by `scale`.

    XLA casts the scale from float32 to `dtype` first, so integers times 0.5 are 0
    (cross_replica_reduces.cpp; seen with one replica).
    """
    if value.dtype != dtype:
        value = memory.empty(value.numel(), dtype).copy_(value)
    return value if scale == 1 else value.mul_(torch.tensor(scale).to(dtype))


def _scale_text(scale: float) -> str:
    """'scale 0.5', or '' for 1. Part of what the ranks compare."""
    return "" if scale == 1 else f"scale {scale:g}"


def _broadcast_text() -> str:
    """'broadcast from rank 1' within xm.collective_broadcast, which is a sum of zeros and the root.

    Other roots on other ranks would add up several tensors, or none.
    """
    frame = sys._getframe(2)  # below xm.all_reduce, in the wrapper of the replaced function
    for outer in (frame, frame.f_back, frame.f_back and frame.f_back.f_back):
        if outer is not None and outer.f_code is xm.collective_broadcast.__code__:
            return f"broadcast from rank {locals_of(outer)['root_ordinal']}"
    return ""


class _Collective:
    """One kind of collective, among the ranks of a run."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers


class AllReduce(_Collective):
    """All ranks get the reduction of their tensors."""

    def new(
        self, reduce_type: str, tensor: torch.Tensor, scale: float, groups: Groups, pin_layout: bool
    ) -> torch.Tensor:
        """`_XLAC._xla_all_reduce`: a new leaf tensor with the input's requires_grad."""
        increment_counter("AllReduce")
        (value,) = self.values(reduce_type, [tensor], scale, groups, pin_layout)
        return on_device(value, tensor, gradient=True)

    def in_place(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float,
        groups: Groups,
        pin_layout: bool,
    ) -> None:
        """`_XLAC._xla_all_reduce_inplace`."""
        increment_counter("AllReduceInPlace")
        detail = _broadcast_text()
        values = self.values(reduce_type, tensors, scale, groups, pin_layout, detail)
        overwrite(tensors, values)

    def values(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float = 1.0,
        groups: Groups = (),
        pin_layout: bool | None = None,
        detail: str = "",
    ) -> list[torch.Tensor]:
        """Reduce on the CPU, with one message per dtype. The ranks compare `detail`, too."""
        detail = detail or _scale_text(scale)
        call = describe_call(f"all_reduce {reduce_type}", tensors, detail, groups)
        everyone, members = self._peers.members(call, groups)
        if problem := _reduction_problem(call, reduce_type, tensors):
            self._peers.refuse(call, everyone, problem)
        self._peers.pin_layouts.add(call, pin_layout)
        values = read_values(tensors, reduced=not groups)
        messages = [
            _Message.of(reduce_type, values, indexes) for indexes in group_by_type(values).values()
        ]
        payload = messages[0].flat if len(messages) == 1 else None
        with self._peers.wire.exchange(call, everyone, payload=payload):
            reduced = [self._reduced(reduce_type, message, members, call) for message in messages]
        for message, flat in zip(messages, reduced, strict=True):
            flat = _scale(flat, scale, message.dtype)
            parts = flat.split_with_sizes(message.sizes)[::2]
            for index, part in zip(message.indexes, parts, strict=True):
                shape = values[index].shape
                values[index] = part if len(shape) == 1 else part.view(shape)
        return values

    def _reduced(
        self, reduce_type: str, message: _Message, members: Sequence[int], call: RankCall
    ) -> torch.Tensor:
        if message.is_sum:
            self._peers.wire.all_reduce(message.flat, members, call)
            return message.flat.view(_REDUCED_AS[message.dtype])
        parts = self._peers.wire.all_gather(message.flat, members, call)
        return _reduce(reduce_type, [part.view(message.dtype) for part in parts])


@dataclass(frozen=True)
class _Message:
    """Values of one dtype, sent together."""

    indexes: list[int]
    dtype: torch.dtype
    is_sum: bool
    """True if gloo may reduce it: not bool, and not min or max, for which gloo ignores NaN."""
    flat: torch.Tensor
    """Numbers if `is_sum`, otherwise bytes."""
    sizes: list[int]
    """Elements of each value, and of the padding after it."""

    @classmethod
    def of(cls, reduce_type: str, values: Sequence[torch.Tensor], indexes: list[int]) -> _Message:
        dtype = values[indexes[0]].dtype
        is_sum = reduce_type == "sum" and dtype != torch.bool
        wire_type = _REDUCED_AS[dtype] if is_sum else dtype
        flat, sizes = flatten_values([values[index] for index in indexes], wire_type)
        if not is_sum:
            flat = flat.view(torch.uint8)
        elif flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        return cls(indexes, dtype, is_sum, flat, sizes)


class AllGather(_Collective):
    """All ranks get the tensors of all, concatenated along a dimension."""

    def new(
        self,
        tensor: torch.Tensor,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> torch.Tensor:
        """`_XLAC._xla_all_gather`."""
        increment_counter("AllGather")
        (value,) = self.values([tensor], dim, shard_count, groups)
        return on_device(value, tensor, gradient=False)

    def pinned(
        self,
        value: torch.Tensor,
        dim: int = 0,
        groups: Groups | None = None,
        pin_layout: bool = True,
    ) -> torch.Tensor:
        """`xm._all_gather_using_all_reduce`. Calls torch_xla's own under dynamo and autograd."""
        graph = torch.is_grad_enabled() and value.requires_grad
        if torch.compiler.is_compiling() or graph or value.dim() == 0 or value.numel() == 0:
            padded: torch.Tensor = _all_gather_upstream(value, dim, groups, pin_layout)
            return padded
        increment_counter("AllReduce" if groups else "all_reduce")
        dim = dim + value.dim() if dim < 0 else dim
        self._peers.pin_layouts.add(describe_call("all_gather", [value], f"dim {dim}"), True)
        rank = self._peers.wire.rank
        own = [group for group in groups or [self._peers.world] if rank in group]
        (joined,) = self.values([value], dim, sum(map(len, own)), groups or ())
        return on_device(joined, value, gradient=False)

    def out(self, output: torch.Tensor, tensor: torch.Tensor, token: Token, *args: Any) -> Token:
        """`_XLAC._xla_all_gather_out`. `args`: those of `values`, here and below."""
        increment_counter("AllGatherOut")
        overwrite([output], self.values([tensor], *args))
        return token

    def coalesced(self, tensors: Sequence[torch.Tensor], token: Token, *args: Any) -> list[Any]:
        """`_XLAC._xla_all_gather_coalesced`: returns the tensors and the token."""
        return [*_without_gradient(self.values(tensors, *args), tensors), token]

    def coalesced_out(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        token: Token,
        *args: Any,
    ) -> Token:
        """`_XLAC._xla_all_gather_coalesced_out`."""
        overwrite(outputs, self.values(tensors, *args))
        return token

    def values(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool = False,
    ) -> list[torch.Tensor]:
        """Gather on the CPU, with one message per dtype."""
        call = describe_call("all_gather", tensors, f"dim {dim}", groups)
        everyone, members = self._peers.members(call, groups)
        if problem := _gather_problem(tensors, dim) or _shard_count_problem(shard_count, members):
            self._peers.refuse(call, everyone, problem)
        values = read_values(tensors)
        messages = [
            (indexes, as_bytes([values[index] for index in indexes]))
            for indexes in group_by_type(values).values()
        ]
        payload = messages[0][1] if len(messages) == 1 else None
        with self._peers.wire.exchange(call, everyone, payload=payload):
            for indexes, flat in messages:
                sizes = [values[index].numel() for index in indexes]
                dtype = values[indexes[0]].dtype
                parts = [
                    part.view(dtype).split(sizes)
                    for part in self._peers.wire.all_gather(flat, members, call)
                ]
                for index, shares in zip(indexes, zip(*parts, strict=True), strict=True):
                    shape = values[index].shape
                    values[index] = join_values([share.reshape(shape) for share in shares], dim)
        return values


def _without_gradient(
    values: Sequence[torch.Tensor], like: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    for value, tensor in zip(values, like, strict=True):
        yield on_device(value, tensor, gradient=False)


def _shard_count_problem(shard_count: int, members: Sequence[int]) -> str:
    """Why XLA refuses this shard count, or ''."""
    if shard_count == len(members):
        return ""
    return f"shard_count is {shard_count}, but the group has {len(members)} ranks"


def _dim_problem(tensor: torch.Tensor, dim: int, name: str = "dim") -> str:
    """Why torch_xla refuses this dimension, or ''.

    The same on a TPU: torch_xla checks when it adds the operation to the program.
    """
    if not 0 <= dim < tensor.dim():
        return f"{name} {dim} is not in 0 … {tensor.dim() - 1}, the dimensions of the tensor"
    return ""


def _gather_problem(tensors: Sequence[torch.Tensor], dim: int) -> str:
    if not tensors:
        return EMPTY_LIST
    counts = Counter(tensor.dtype for tensor in tensors)
    for index, tensor in enumerate(tensors):
        if problem := _dim_problem(tensor, dim):
            return problem
        # torch_xla's BuildAllGatherCoalesced puts a single tensor of its type first.
        if index and counts[tensor.dtype] == 1:
            return (
                f"torch_xla crashes if a list has a single tensor of some type ({tensor.dtype}), "
                "also on a TPU: gather that tensor separately"
            )
    return EMPTY if _first_is_empty(tensors) else ""


def _first_is_empty(tensors: Sequence[torch.Tensor]) -> bool:
    """True if the first tensor of some dtype is empty: torch_xla ties its token to that one."""
    firsts = {tensor.dtype: tensor for tensor in reversed(tensors)}
    return any(tensor.numel() == 0 for tensor in firsts.values())


class ReduceScatter(_Collective):
    """Each rank gets its share of the reduction."""

    def new(
        self,
        reduce_type: str,
        tensor: torch.Tensor,
        token: Token,
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_reduce_scatter`: a new leaf with the input's requires_grad; the token."""
        increment_counter("ReduceScatter")
        (value,) = self.values(reduce_type, [tensor], scale, dim, shard_count, groups)
        return on_device(value, tensor, gradient=True), token

    def out(
        self, reduce_type: str, output: torch.Tensor, tensor: torch.Tensor, token: Token, *args: Any
    ) -> Token:
        """`_XLAC._xla_reduce_scatter_out`. `args`: those of `values`, here and below."""
        increment_counter("ReduceScatterOut")
        overwrite([output], self.values(reduce_type, [tensor], *args))
        return token

    def coalesced(
        self, reduce_type: str, tensors: Sequence[torch.Tensor], token: Token, *args: Any
    ) -> list[Any]:
        """`_XLAC._xla_reduce_scatter_coalesced`: returns tensors without grad, and the token."""
        return [*_without_gradient(self.values(reduce_type, tensors, *args), tensors), token]

    def coalesced_out(
        self,
        reduce_type: str,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        token: Token,
        *args: Any,
    ) -> Token:
        """`_XLAC._xla_reduce_scatter_coalesced_out`."""
        overwrite(outputs, self.values(reduce_type, tensors, *args))
        return token

    def values(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool = False,
    ) -> list[torch.Tensor]:
        """This rank's shares on the CPU, with one message per dtype.

        Each rank receives its share from all ranks and reduces it: half the bytes of an
        all-reduce.
        """
        scaled = _scale_text(scale)
        detail = f"dim {dim}, {scaled}" if scaled else f"dim {dim}"
        call = describe_call(f"reduce_scatter {reduce_type}", tensors, detail, groups)
        everyone, members = self._peers.members(call, groups)
        problem = (
            _reduction_problem(call, reduce_type, tensors)
            or _shard_count_problem(shard_count, members)
            or _scatter_problem(tensors, dim, shard_count)
        )
        if problem:
            self._peers.refuse(call, everyone, problem)
        values = read_values(tensors, reduced=not groups)
        messages = []
        for indexes in group_by_type(values).values():
            chunks = [values[index].chunk(shard_count, dim) for index in indexes]
            shapes = [parts[0].shape for parts in chunks]
            flat = as_bytes([chunk for per_rank in zip(*chunks, strict=True) for chunk in per_rank])
            messages.append((indexes, shapes, flat))
        payload = messages[0][-1] if len(messages) == 1 else None
        with self._peers.wire.exchange(call, everyone, payload=payload):
            for indexes, shapes, flat in messages:
                sizes = [flat.numel() // shard_count] * shard_count
                dtype = values[indexes[0]].dtype
                received = self._peers.wire.all_to_all(flat, sizes, sizes, members, call)
                parts = [part.view(dtype) for part in received.split(sizes)]
                share = _scale(_reduce(reduce_type, parts), scale, dtype)
                counts = [shape.numel() for shape in shapes]
                for index, shape, part in zip(indexes, shapes, share.split(counts), strict=True):
                    values[index] = part.reshape(shape)
        return values


def _scatter_problem(tensors: Sequence[torch.Tensor], dim: int, shard_count: int) -> str:
    if not tensors:
        return EMPTY_LIST
    for tensor in tensors:
        if problem := _dim_problem(tensor, dim, "scatter_dim"):
            return problem
        if tensor.shape[dim] % shard_count:
            shape = list(tensor.shape)
            return f"dimension {dim} of {shape} cannot be split into {shard_count} equal shares"
    return EMPTY if _first_is_empty(tensors) else ""


class AllToAll(_Collective):
    """Each rank cuts its tensor into shares; share i goes to rank i."""

    def new(
        self,
        tensor: torch.Tensor,
        token: Token,
        split_dim: int,
        concat_dim: int,
        split_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_all_to_all`: a new leaf with the input's requires_grad, and the token."""
        increment_counter("AllToAll")
        value = self.values(tensor, split_dim, concat_dim, split_count, groups)
        return on_device(value, tensor, gradient=True), token

    def values(
        self,
        tensor: torch.Tensor,
        split_dim: int,
        concat_dim: int,
        split_count: int,
        groups: Groups = (),
    ) -> torch.Tensor:
        """On the CPU: the shares that all ranks sent to this one, concatenated."""
        detail = f"from dim {split_dim} to {concat_dim}"
        call = describe_call("all_to_all", [tensor], detail, groups)
        everyone, members = self._peers.members(call, groups)
        problem = _dim_problem(tensor, split_dim, "split_dimension")
        problem = problem or _dim_problem(tensor, concat_dim, "concat_dimension")
        if not problem and split_count != len(members):
            problem = f"split_count is {split_count}, but the group has {len(members)} ranks"
        if not problem and tensor.shape[split_dim] % split_count:
            problem = f"dimension {split_dim} cannot be split into {split_count} equal shares"
        if not problem and tensor.numel() == 0:
            problem = EMPTY
        if problem:
            self._peers.refuse(call, everyone, problem)
        (value,) = read_values([tensor])
        chunks = value.chunk(split_count, split_dim)
        flat = as_bytes(chunks)
        sizes = [flat.numel() // split_count] * split_count
        with self._peers.wire.exchange(call, everyone, payload=flat):
            received = self._peers.wire.all_to_all(flat, sizes, sizes, members, call)
        parts = received.split(sizes)
        shape = chunks[0].shape
        return join_values([part.view(value.dtype).reshape(shape) for part in parts], concat_dim)


class CollectivePermute(_Collective):
    """Each rank sends its tensor to at most one other rank."""

    def new(
        self, tensor: torch.Tensor, token: Token, pairs: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_collective_permute`: the tensor of this rank's source, or zeros.

        All ranks take part, even those in no pair: on a TPU they run one program. Only for
        torch.distributed's send and recv, which are one pair on two ranks, just these two take
        part: see `process_groups.warn_of_pairs`. A new leaf with the input's requires_grad.
        """
        rank = self._peers.wire.rank
        pairwise = process_groups.is_pairwise()
        targets = {int(source): int(target) for source, target in pairs}
        sources = {target: source for source, target in targets.items()}
        named = sorted({*targets, *sources})
        members = named if pairwise else self._peers.world
        detail = f"pairs {sorted(map(list, pairs))}"
        call = describe_call("collective_permute", [tensor], detail)
        problem = ""
        if not len(targets) == len(sources) == len(pairs):
            problem = "XLA accepts each rank once as a source and once as a target"
        elif set(named) - set(self._peers.world):
            problem = f"only ranks 0 … {len(self._peers.world) - 1} exist"
        elif tensor.numel() == 0:
            problem = EMPTY
        if problem:
            self._peers.refuse(call, self._peers.world, problem)
        (value,) = read_values([tensor])
        flat = as_bytes([value])
        sent = [flat.numel() * (targets.get(rank) == member) for member in members]
        expected = [flat.numel() * (sources.get(rank) == member) for member in members]
        with self._peers.wire.exchange(call, members):
            received = self._peers.wire.all_to_all(flat[: sum(sent)], sent, expected, members, call)
        if rank not in sources:
            received = torch.zeros_like(flat)
        result = received.view(value.dtype).reshape(value.shape)
        return on_device(result, tensor, gradient=True, of_all=not pairwise), token
