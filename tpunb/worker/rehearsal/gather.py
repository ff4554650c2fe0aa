"""All-gather in a rehearsal. Signatures are those of torch_xla (2.8, 2.9)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from tpunb.worker.rehearsal.peers import Groups, Peers, by_type, counted, describe
from tpunb.worker.rehearsal.transfer import as_bytes, join
from tpunb.worker.rehearsal.values import on_device, overwrite, read

_padded: Callable[..., Any] = xm._all_gather_using_all_reduce
"""Upstream's way for a layout that is pinned."""

Token = Any
"""torch_xla's order of collectives within a program. There is none here: it is passed on."""


class AllGather:
    """Every rank gets the tensors of all, joined along a dimension."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

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
        counted("AllGather")
        (value,) = self.values([tensor], dim, shard_count, groups)
        return on_device(value, tensor, gradient=False)

    def pinned(
        self,
        value: torch.Tensor,
        dim: int = 0,
        groups: Groups | None = None,
        pin_layout: bool = True,
    ) -> torch.Tensor:
        """`xm._all_gather_using_all_reduce`; upstream's where dynamo or autograd looks into it."""
        graph = torch.is_grad_enabled() and value.requires_grad
        if torch.compiler.is_compiling() or graph or value.dim() == 0 or value.numel() == 0:
            padded: torch.Tensor = _padded(value, dim, groups, pin_layout)
            return padded
        counted("AllReduce" if groups else "all_reduce")
        dim = dim + value.dim() if dim < 0 else dim
        self._peers.layouts.add(describe("all_gather", [value], f"dim {dim}"), True)
        rank = self._peers.wire.rank
        own = [group for group in groups or [self._peers.world] if rank in group]
        (joined,) = self.values([value], dim, sum(map(len, own)), groups or ())
        return on_device(joined, value, gradient=False)

    def out(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        token: Token,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> Token:
        """`_XLAC._xla_all_gather_out`."""
        counted("AllGatherOut")
        overwrite([output], self.values([tensor], dim, shard_count, groups))
        return token

    def coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        token: Token,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> list[Any]:
        """`_XLAC._xla_all_gather_coalesced`: the tensors and the token."""
        values = self.values(tensors, dim, shard_count, groups)
        pairs = zip(values, tensors, strict=True)
        return [*(on_device(value, tensor, gradient=False) for value, tensor in pairs), token]

    def coalesced_out(
        self,
        outputs: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor],
        token: Token,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
    ) -> Token:
        """`_XLAC._xla_all_gather_coalesced_out`."""
        overwrite(outputs, self.values(tensors, dim, shard_count, groups))
        return token

    def values(
        self, tensors: Sequence[torch.Tensor], dim: int, shard_count: int, groups: Groups
    ) -> list[torch.Tensor]:
        """The joined values on the CPU, one message for all tensors of one type."""
        call = describe("all_gather", tensors, f"dim {dim}", groups)
        everyone, members = self._peers.members(call, groups)
        if problem := _problem(tensors, dim) or shards_problem(shard_count, members):
            self._peers.refuse(call, everyone, problem)
        values = read(tensors)
        messages = [
            (indexes, as_bytes([values[index] for index in indexes]))
            for indexes in by_type(values).values()
        ]
        brought = messages[0][1] if len(messages) == 1 else None
        with self._peers.wire.together(call, everyone, brought=brought):
            for indexes, flat in messages:
                sizes = [values[index].numel() for index in indexes]
                dtype = values[indexes[0]].dtype
                parts = [
                    part.view(dtype).split(sizes)
                    for part in self._peers.wire.all_gather(flat, members, call)
                ]
                for index, shares in zip(indexes, zip(*parts, strict=True), strict=True):
                    shape = values[index].shape
                    values[index] = join([share.reshape(shape) for share in shares], dim)
        return values


def shards_problem(shard_count: int, members: Sequence[int]) -> str:
    """What XLA refuses about a count of shards, or ''."""
    if shard_count == len(members):
        return ""
    return f"shard_count is {shard_count}, of {len(members)} ranks in the group"


def dim_problem(tensor: torch.Tensor, dim: int, name: str = "dim") -> str:
    """What torch_xla refuses about a tensor and a dimension of it, or ''.

    So on a TPU: it happens where torch_xla adds the operation to the program.
    """
    if not 0 <= dim < tensor.dim():
        return f"{name} {dim} is not in 0 … {tensor.dim() - 1}, its dimensions"
    return ""


EMPTY = (
    "torch_xla fails with an empty tensor here ('Slice size at index 0 in gather op is out of "
    "range'), also on a TPU"
)


def _problem(tensors: Sequence[torch.Tensor], dim: int) -> str:
    if not tensors:
        return "torch_xla crashes with an empty list here, also on a TPU"
    counts = Counter(tensor.dtype for tensor in tensors)
    for index, tensor in enumerate(tensors):
        if problem := dim_problem(tensor, dim):
            return problem
        # torch_xla's BuildAllGatherCoalesced puts what is alone of its type first.
        if index and counts[tensor.dtype] == 1:
            return (
                f"torch_xla crashes where a list has one tensor only of a type ({tensor.dtype}), "
                "also on a TPU: gather it by itself"
            )
    return EMPTY if first_is_empty(tensors) else ""


def first_is_empty(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the first tensor of some type is empty: torch_xla ties its token to that one."""
    firsts = {tensor.dtype: tensor for tensor in reversed(tensors)}
    return any(tensor.numel() == 0 for tensor in firsts.values())
