"""What torch_xla's collectives do in a rehearsal: XLA tensor → CPU → gloo → XLA tensor.

Signatures are those of torch_xla (2.8, 2.9), so that its own Python code calls them unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.runtime as xr

from tpunb.errors import TpunbError
from tpunb.worker.rehearsal import divergence
from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.compiled import left_to_dynamo
from tpunb.worker.rehearsal.gloo import Wire

Groups = Sequence[Sequence[int]]

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
# XLA's PRED type, seen as 0 and 1.
_BOOL_REDUCTIONS = {
    name: dist.ReduceOp.MIN if name in ("mul", "and", "min") else dist.ReduceOp.MAX
    for name in _REDUCTIONS
}
# The type in which gloo reduces. A TPU sums 16-bit floats in 32 bits as well.
_WIRE_TYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int32,
    torch.int16: torch.int32,
    torch.int8: torch.int8,
    torch.uint8: torch.uint8,
    torch.bool: torch.uint8,
}


class NotRehearsedError(TpunbError, NotImplementedError):
    """A collective that rehearsal ranks do not have, though a TPU has.

    A NotImplementedError as well: torch raises that for an operation which a backend lacks.
    """

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        because = f" ({self.why})" if self.why else ""
        return (
            f"{self.what} is not rehearsed on CPU cores{because}. Rehearsed are "
            "xm.optimizer_step, xm.reduce_gradients, xm.all_reduce, xm.all_gather, "
            "xm.collective_broadcast, xm.broadcast_master_param, xm.mesh_reduce and "
            "xm.rendezvous. Nothing is replaced on a TPU, where it works as ever"
        )


def refusing(name: str, why: str) -> Callable[..., NoReturn]:
    """A stand-in for a collective that is not rehearsed: calling it raises NotRehearsedError."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotRehearsedError(name, why)

    refuse.__name__ = name
    return refuse


class Collectives:
    """The rehearsed collectives of one rank."""

    def __init__(self, wire: Wire, world_size: int) -> None:
        self._wire = wire
        self._world = tuple(range(world_size))

    def all_reduce(
        self,
        reduce_type: str,
        tensor: torch.Tensor,
        scale: float,
        groups: Groups,
        pin_layout: bool,
    ) -> torch.Tensor:
        """`_XLAC._xla_all_reduce`: a new tensor, a leaf that requires grad as the input does."""
        (reduced,) = self._all_reduce(reduce_type, [tensor], scale, groups)
        return reduced.to(tensor.device).requires_grad_(tensor.requires_grad)

    def all_reduce_inplace(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float,
        groups: Groups,
        pin_layout: bool,
    ) -> None:
        """`_XLAC._xla_all_reduce_inplace`: autograd does not see the change, views do."""
        reduced = self._all_reduce(reduce_type, tensors, scale, groups)
        for tensor, value in zip(tensors, reduced, strict=True):
            tensor.data.copy_(value)

    def functional_all_reduce(
        self, tensor: torch.Tensor, reduce_type: str, group_name: str
    ) -> torch.Tensor:
        """`_c10d_functional::all_reduce` on XLA: over all ranks, as torch_xla's own kernel does."""
        (reduced,) = self._all_reduce(reduce_type, [tensor], 1.0, ())
        return reduced.to(tensor.device)

    def all_gather(
        self,
        tensor: torch.Tensor,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> torch.Tensor:
        """`_XLAC._xla_all_gather`: the tensors of a group, joined along `dim`."""
        call = Call("all_gather", (_kind(tensor),), f"dim {dim}{_group_text(groups)}")
        _refuse_while_compiling(call)
        taking_part, members = self._members(groups)
        if len(members) != shard_count:
            raise ValueError(f"{call}: shard_count is {shard_count}, of {len(members)} ranks")
        (value,) = _read([tensor])
        with self._wire.together(call, taking_part):
            parts = self._wire.all_gather(_as_bytes(value), members, call)
        shaped = [part.view(value.dtype).reshape(value.shape) for part in parts]
        return torch.cat(shaped, dim).to(tensor.device)

    @left_to_dynamo
    def rendezvous(
        self,
        payload: bytes = b"",
        ordinals: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> list[bytes]:
        """`xm.xla_rendezvous`: runs what is pending, waits for all ranks, their payloads."""
        if ordinals and len(ordinals) != xr.global_device_count():
            raise ValueError("Only global rendezvous is supported")
        if not isinstance(payload, bytes):
            raise TypeError(f"`payload` must be bytes, not {type(payload)}")
        torch_xla.sync()
        call = Call("rendezvous", label=repr(tag) if tag else "")
        with self._wire.together(call, self._world, len(payload)) as sizes:
            return self._wire.all_gather_bytes(payload, sizes, self._world, call)

    def _all_reduce(
        self,
        reduce_type: str,
        tensors: Sequence[torch.Tensor],
        scale: float,
        groups: Groups,
    ) -> list[torch.Tensor]:
        """The reduced values as CPU tensors, one message for all tensors of one wire type."""
        scaled = "" if scale == 1 else f"scale {scale:g}"
        detail = f"{scaled}{_group_text(groups)}".removeprefix(", ")
        call = Call(f"all_reduce {reduce_type}", tuple(map(_kind, tensors)), detail)
        _refuse_while_compiling(call)
        _check_reduction(call, reduce_type, tensors)
        taking_part, members = self._members(groups)
        values = _read(tensors)
        with self._wire.together(call, taking_part):
            for indexes, reduction, flat in _messages(reduce_type, values):
                self._wire.all_reduce(flat, reduction, members, call)
                sizes = [values[index].numel() for index in indexes]
                for index, part in zip(indexes, flat.split(sizes), strict=True):
                    reduced = part.to(values[index].dtype).reshape(values[index].shape)
                    values[index] = _scaled(reduced, scale)
        return values

    def _members(self, groups: Groups) -> tuple[Sequence[int], Sequence[int]]:
        """All ranks that take part in some group, and those of this rank's group."""
        if not groups:
            return self._world, self._world
        for group in groups:
            if self._wire.rank in group:
                return sorted({rank for group in groups for rank in group}), tuple(group)
        raise ValueError(f"rank {self._wire.rank} is in none of the groups {groups}")


def _kind(tensor: torch.Tensor) -> str:
    """'float32[3, 4]'."""
    elsewhere = "" if tensor.device.type == "xla" else f" on {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{elsewhere}"


def _group_text(groups: Groups) -> str:
    return f", groups {[list(group) for group in groups]}" if groups else ""


def _read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values on the CPU. Computes what is pending, and runs no step closures.

    Before the others are waited for: an interrupt or an error in a long computation finds this
    rank outside the collective. Not `torch_xla.sync()`: that would run closures in the middle
    of a step.
    """
    plain = [tensor.detach() for tensor in tensors]
    divergence.mine.look(plain)
    _XLAC._xla_sync_live_tensors("", [], False)
    values: list[torch.Tensor] = _XLAC._xla_get_cpu_tensors(plain)
    return values


def _messages(
    reduce_type: str, values: Sequence[torch.Tensor]
) -> Iterator[tuple[list[int], dist.ReduceOp.RedOpType, torch.Tensor]]:
    """Which values go together, how they are reduced, and their flat concatenation."""
    together: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, value in enumerate(values):
        key = _WIRE_TYPES[value.dtype], value.dtype == torch.bool
        together.setdefault(key, []).append(index)
    for (wire_type, is_bool), indexes in together.items():
        parts = [values[index].reshape(-1).to(wire_type) for index in indexes]
        reduction = (_BOOL_REDUCTIONS if is_bool else _REDUCTIONS)[reduce_type]
        yield indexes, reduction, parts[0] if len(parts) == 1 else torch.cat(parts)


def _scaled(value: torch.Tensor, scale: float) -> torch.Tensor:
    """`value` times `scale`, which XLA first turns from float32 into the tensor's type.

    So integers times 0.5 are 0 (cross_replica_reduces.cpp; seen with one replica).
    """
    return value if scale == 1 else value.mul_(torch.tensor(scale).to(value.dtype))


def _as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)


def _check_reduction(call: Call, reduce_type: str, tensors: Sequence[torch.Tensor]) -> None:
    if reduce_type not in _REDUCTIONS:
        raise ValueError(f"{call}: there is no reduce type {reduce_type!r}")
    for tensor in tensors:
        if tensor.dtype not in _WIRE_TYPES:
            raise NotRehearsedError(f"{call.operation} of {tensor.dtype}")
        if reduce_type in ("and", "or") and tensor.is_floating_point():
            raise ValueError(f"{call}: {reduce_type!r} needs bool or integer tensors")


def _refuse_while_compiling(call: Call) -> None:
    bridge = sys.modules.get("torch_xla._dynamo.dynamo_bridge")
    if bridge is None:
        return
    compiling = bridge.extract_compiled_graph.__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is compiling:
            raise NotRehearsedError(
                call.operation, "inside a function that torch.compile compiles; call it outside"
            )
        frame = frame.f_back
