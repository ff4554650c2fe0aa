"""torch_xla's collectives in a rehearsal: XLA tensors → CPU → the wire → XLA tensors.

Each function takes the arguments of the torch_xla function that it replaces (2.8, 2.9), so that
torch_xla's own Python code calls it unchanged. Calls that XLA's compiler or torch_xla refuses on a
TPU are refused in a rehearsal, too.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from tpunb.backends.rehearsal.buffers import as_bytes, flatten_values, join_values, memory
from tpunb.backends.rehearsal.call import RankCall, describe
from tpunb.backends.rehearsal.errors import NotRehearsedError
from tpunb.backends.rehearsal.wire import REDUCED_AS, Wire
from tpunb.backends.xla.private_names import OPS
from tpunb.backends.xla.rehearsal import xla_process_group
from tpunb.backends.xla.rehearsal.divergence import PinLayoutCheck
from tpunb.backends.xla.rehearsal.values import on_device, overwrite, read_values
from tpunb.utils.frame_locals import locals_of

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]

Groups = Sequence[Sequence[int]]
Tensors = Sequence[torch.Tensor]
Receive = Callable[[Sequence[int], RankCall], list[torch.Tensor]]
"""Exchange a message with the ranks of the group, and return its tensors."""
Pack = Callable[[Tensors], tuple[torch.Tensor, Receive]]
"""Make a message of tensors of one type."""
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
_REDUCED = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""Types that are reduced."""


class CrossReplica:
    """The collectives of one rank, among all ranks of the run."""

    def __init__(self, wire: Wire, world_size: int) -> None:
        self.wire = wire
        self.world = tuple(range(world_size))
        self._pin_layouts = PinLayoutCheck(wire.rank)

    def xlac(self) -> dict[str, Callable[..., Any]]:
        """The functions, by the attributes of torch_xla._XLAC that they replace."""
        return {
            "_xla_all_reduce": self.all_reduce,
            "_xla_all_reduce_inplace": self.all_reduce_in_place,
            "_xla_all_gather": self.all_gather,
            "_xla_reduce_scatter": self.reduce_scatter,
            "_xla_all_to_all": self.all_to_all,
            "_xla_collective_permute": self.collective_permute,
            "_set_all_reduce_token": self._pin_layouts.set_token,
            **_variants("_xla_all_gather", "AllGatherOut", self.gathered, 0),
            **_variants("_xla_reduce_scatter", "ReduceScatterOut", self.scattered, 1),
        }

    def model(self) -> dict[str, Callable[..., Any]]:
        """The functions, by the attributes of torch_xla.core.xla_model that they replace."""
        rendezvous = torch.compiler.disable(self.rendezvous)
        return {"_all_gather_using_all_reduce": self.pinned, "xla_rendezvous": rendezvous}

    # -- one collective

    def _exchange(
        self,
        call: RankCall,
        groups: Groups,
        tensors: Tensors,
        pack: Pack,
        problem: str,
        *,
        reduced: bool = False,
    ) -> list[torch.Tensor]:
        """Exchange tensors on the CPU, with one message for each of their types.

        All groups take part, because a TPU's cores start a program together. `problem`: why XLA
        refuses the call, or ''. Raises ValueError for that, and for groups that XLA's compiler
        refuses: "replica groups should contain 4 replicas, but found 2".
        """
        members = self._members(call, groups)
        if problem:
            self._refuse(call, problem)
        values = read_values(tensors, reduced=reduced and not groups)
        indexes: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(values):
            indexes.setdefault(value.dtype, []).append(index)
        messages = [(each, *pack([values[i] for i in each])) for each in indexes.values()]
        payload = messages[0][1] if len(messages) == 1 else None
        with self.wire.exchange(call, self.world, payload):
            received = [receive(members, call) for _, _, receive in messages]
        for (each, *_), results in zip(messages, received, strict=True):
            for index, result in zip(each, results, strict=True):
                values[index] = result
        return values

    def _members(self, call: RankCall, groups: Groups) -> Sequence[int]:
        """The ranks of this rank's group."""
        if not groups:
            return self.world
        if sorted(rank for group in groups for rank in group) != list(self.world) or not all(
            groups
        ):
            raise ValueError(
                f"{call}: XLA accepts only non-empty groups that name each of the "
                f"{len(self.world)} ranks once, and every rank must make the call. With "
                "torch.distributed, `dist.new_group(ranks, pg_options={'xla_pg_options': {'spmd': "
                "True}})` names the other ranks as well"
            )
        return next(tuple(group) for group in groups if self.wire.rank in group)

    def _refuse(self, call: RankCall, problem: str) -> NoReturn:
        """Raise ValueError on all ranks that made this call.

        Raises MismatchError instead if the ranks made different calls: the cause may then be on
        another rank.
        """
        self.wire.meet(call, self.world)
        raise ValueError(f"{call}: {problem}")

    # -- all_reduce

    def all_reduce(
        self, reduce_type: str, tensor: torch.Tensor, scale: float, groups: Groups, pin_layout: bool
    ) -> torch.Tensor:
        """`_XLAC._xla_all_reduce`: a new leaf tensor with the input's requires_grad."""
        increment_counter("AllReduce")
        (value,) = self.reduced(reduce_type, [tensor], scale, groups, pin_layout)
        return on_device(value, tensor, gradient=True)

    def all_reduce_in_place(
        self, reduce_type: str, tensors: Tensors, scale: float, groups: Groups, pin_layout: bool
    ) -> None:
        """`_XLAC._xla_all_reduce_inplace`."""
        increment_counter("AllReduceInPlace")
        root = _broadcast_root()
        overwrite(tensors, self.reduced(reduce_type, tensors, scale, groups, pin_layout, root))

    def reduced(
        self,
        reduce_type: str,
        tensors: Tensors,
        scale: float = 1.0,
        groups: Groups = (),
        pin_layout: bool | None = None,
        detail: str = "",
    ) -> list[torch.Tensor]:
        """All ranks get the reduction of their tensors, on the CPU. They compare `detail`, too."""
        call = describe_call(
            f"all_reduce {reduce_type}", tensors, detail or _scale_text(scale), groups
        )
        problem = _reduction_problem(call, reduce_type, tensors)

        def pack(values: Tensors) -> tuple[torch.Tensor, Receive]:
            dtype = values[0].dtype
            # gloo may add: not bool, and no min and max, for which it ignores NaN.
            is_sum = reduce_type == "sum" and dtype != torch.bool
            wide = REDUCED_AS.get(dtype, dtype) if is_sum else dtype
            total, sizes = flatten_values(values, wide)
            flat = total if is_sum else total.view(torch.uint8)
            if flat.is_complex():
                flat = torch.view_as_real(flat).view(-1)

            def receive(members: Sequence[int], call: RankCall) -> list[torch.Tensor]:
                nonlocal total
                if is_sum:
                    self.wire.all_reduce(flat, members, call)
                else:
                    parts = self.wire.all_gather(flat, members, call)
                    total = _reduce(reduce_type, [part.view(dtype) for part in parts])
                split = _scale(total, scale, dtype).split_with_sizes(sizes)[::2]
                return [part.view(v.shape) for part, v in zip(split, values, strict=True)]

            return flat, receive

        if not problem:
            self._pin_layouts.add(call, pin_layout)
        return self._exchange(call, groups, tensors, pack, problem, reduced=True)

    # -- all_gather

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
        """`_XLAC._xla_all_gather`."""
        increment_counter("AllGather")
        (value,) = self.gathered([tensor], dim, shard_count, groups)
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
        self._pin_layouts.add(describe_call("all_gather", [value], f"dim {dim}"), True)
        own = [group for group in groups or [self.world] if self.wire.rank in group]
        (joined,) = self.gathered([value], dim, sum(map(len, own)), groups or ())
        return on_device(joined, value, gradient=False)

    def gathered(
        self,
        tensors: Tensors,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool = False,
    ) -> list[torch.Tensor]:
        """All ranks get the tensors of all, concatenated along a dimension, on the CPU."""
        call = describe_call("all_gather", tensors, f"dim {dim}", groups)
        problem = _problem(tensors, dim) or self._count_problem("shard", shard_count, call, groups)
        counts = Counter(tensor.dtype for tensor in tensors)
        for tensor in tensors[1:]:
            # torch_xla's BuildAllGatherCoalesced puts a single tensor of its type first.
            if counts[tensor.dtype] == 1 and not problem:
                problem = (
                    "torch_xla crashes if a list has a single tensor of some type "
                    f"({tensor.dtype}), also on a TPU: gather that tensor separately"
                )

        def pack(values: Tensors) -> tuple[torch.Tensor, Receive]:
            flat, sizes = as_bytes(values), [value.numel() for value in values]

            def receive(members: Sequence[int], call: RankCall) -> list[torch.Tensor]:
                parts = [
                    part.view(values[0].dtype).split(sizes)
                    for part in self.wire.all_gather(flat, members, call)
                ]
                return [
                    join_values([share.reshape(value.shape) for share in shares], dim)
                    for value, *shares in zip(values, *parts, strict=True)
                ]

            return flat, receive

        return self._exchange(call, groups, tensors, pack, problem)

    # -- reduce_scatter and all_to_all

    def reduce_scatter(
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
        (value,) = self.scattered(reduce_type, [tensor], scale, dim, shard_count, groups)
        return on_device(value, tensor, gradient=True), token

    def scattered(
        self,
        reduce_type: str,
        tensors: Tensors,
        scale: float,
        dim: int,
        shard_count: int,
        groups: Groups,
        pin_layout: bool = False,
    ) -> list[torch.Tensor]:
        """This rank's shares of the reductions, on the CPU.

        Each rank receives its share from all ranks and reduces it: half the bytes of an
        all-reduce.
        """
        detail = ", ".join(filter(None, (f"dim {dim}", _scale_text(scale))))
        call = describe_call(f"reduce_scatter {reduce_type}", tensors, detail, groups)
        problem = (
            _reduction_problem(call, reduce_type, tensors)
            or self._count_problem("shard", shard_count, call, groups)
            or _problem(tensors, dim, "scatter_dim", shard_count)
        )

        def pack(values: Tensors) -> tuple[torch.Tensor, Receive]:
            chunks = [value.chunk(shard_count, dim) for value in values]
            flat = as_bytes([chunk for of_rank in zip(*chunks, strict=True) for chunk in of_rank])

            def receive(members: Sequence[int], call: RankCall) -> list[torch.Tensor]:
                dtype, shapes = values[0].dtype, [parts[0].shape for parts in chunks]
                parts = [part.view(dtype) for part in self._scatter(flat, members, call)]
                share = _scale(_reduce(reduce_type, parts), scale, dtype)
                split = share.split([shape.numel() for shape in shapes])
                return [part.reshape(shape) for part, shape in zip(split, shapes, strict=True)]

            return flat, receive

        return self._exchange(call, groups, tensors, pack, problem, reduced=True)

    def all_to_all(
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
        value = self.shuffled(tensor, split_dim, concat_dim, split_count, groups)
        return on_device(value, tensor, gradient=True), token

    def shuffled(
        self,
        tensor: torch.Tensor,
        split_dim: int,
        concat_dim: int,
        split_count: int,
        groups: Groups = (),
    ) -> torch.Tensor:
        """The shares that all ranks sent to this one, concatenated, on the CPU."""
        detail = f"from dim {split_dim} to {concat_dim}"
        call = describe_call("all_to_all", [tensor], detail, groups)
        problem = (
            _problem([tensor], concat_dim, "concat_dimension")
            or self._count_problem("split", split_count, call, groups)
            or _problem([tensor], split_dim, "split_dimension", split_count)
        )

        def pack(values: Tensors) -> tuple[torch.Tensor, Receive]:
            chunks = values[0].chunk(split_count, split_dim)
            flat = as_bytes(chunks)

            def receive(members: Sequence[int], call: RankCall) -> list[torch.Tensor]:
                dtype, shape = values[0].dtype, chunks[0].shape
                parts = self._scatter(flat, members, call)
                shares = [part.view(dtype).reshape(shape) for part in parts]
                return [join_values(shares, concat_dim)]

            return flat, receive

        (value,) = self._exchange(call, groups, [tensor], pack, problem)
        return value

    def _scatter(self, flat: torch.Tensor, members: Sequence[int], call: RankCall) -> Tensors:
        """Send each rank an equal part, and receive one from each."""
        sizes = [flat.numel() // len(members)] * len(members)
        parts: Tensors = self.wire.all_to_all(flat, sizes, sizes, members, call).split(sizes)
        return parts

    def _count_problem(self, what: str, count: int, call: RankCall, groups: Groups) -> str:
        """Why XLA refuses this number of parts, or ''."""
        members = self._members(call, groups)
        if count == len(members):
            return ""
        return f"{what}_count is {count}, but the group has {len(members)} ranks"

    # -- collective_permute and rendezvous

    def collective_permute(
        self, tensor: torch.Tensor, token: Token, pairs: Sequence[Sequence[int]]
    ) -> tuple[torch.Tensor, Token]:
        """`_XLAC._xla_collective_permute`: the tensor of this rank's source, or zeros.

        All ranks take part, even those in no pair: on a TPU they run one program. Only for
        torch.distributed's send and recv, which are one pair on two ranks, just these two take
        part: see `xla_process_group.warn_of_pairs`. A new leaf with the input's requires_grad.
        """
        rank = self.wire.rank
        pairwise = xla_process_group.is_pairwise()
        targets = {int(source): int(target) for source, target in pairs}
        sources = {target: source for source, target in targets.items()}
        named = sorted({*targets, *sources})
        members = named if pairwise else self.world
        detail = f"pairs {sorted(map(list, pairs))}"
        call = describe_call("collective_permute", [tensor], detail)
        problem = ""
        if not len(targets) == len(sources) == len(pairs):
            problem = "XLA accepts each rank once as a source and once as a target"
        elif set(named) - set(self.world):
            problem = f"only ranks 0 … {len(self.world) - 1} exist"
        elif tensor.numel() == 0:
            problem = EMPTY
        if problem:
            self._refuse(call, problem)
        (value,) = read_values([tensor])
        flat = as_bytes([value])
        sent = [flat.numel() * (targets.get(rank) == member) for member in members]
        expected = [flat.numel() * (sources.get(rank) == member) for member in members]
        with self.wire.exchange(call, members):
            received = self.wire.all_to_all(flat[: sum(sent)], sent, expected, members, call)
        if rank not in sources:
            received = torch.zeros_like(flat)
        result = received.view(value.dtype).reshape(value.shape)
        return on_device(result, tensor, gradient=True, of_all=not pairwise), token

    def rendezvous(
        self, payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
    ) -> list[bytes]:
        """`xm.xla_rendezvous`: run pending work, wait for all ranks, return their payloads.

        xm.rendezvous, xm.mesh_reduce and xm.do_on_ordinals are built on it.
        """
        if ordinals and len(ordinals) != len(self.world):
            raise ValueError("Only global rendezvous is supported")
        if not isinstance(payload, bytes):
            raise TypeError(f"`payload` must be bytes, not {type(payload)}")
        torch_xla.sync()
        call = RankCall("rendezvous", label=repr(tag) if tag else "")
        return self.wire.all_gather_bytes(payload, self.world, call)

    # -- torch.compile

    def operators(self) -> dict[str, Callable[..., Any]]:
        """XLA kernels of torch.ops._c10d_functional, which torch.compile can trace, by name.

        torch's dispatcher adds autograd. torch_xla's own kernels ignore groups too, and use all
        ranks.
        """

        def all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
            increment_counter("all_reduce")
            # xm.all_reduce names no group; torch.distributed's all_reduce under dynamo does.
            pinned = None if group_name else True
            (value,) = self.reduced(reduce_op, [tensor], pin_layout=pinned)
            return on_device(value, tensor, gradient=False)

        def gather(tensor: torch.Tensor, group_size: int, group_name: str) -> torch.Tensor:
            increment_counter("all_gather_into_tensor")
            (value,) = self.gathered([tensor], 0, group_size, [range(group_size)])
            return on_device(value, tensor, gradient=False)

        def scatter(
            tensor: torch.Tensor, reduce_op: str, group_size: int, group_name: str
        ) -> torch.Tensor:
            increment_counter("reduce_scatter_tensor")
            groups = [range(group_size)]
            (value,) = self.scattered(reduce_op, [tensor], 1.0, 0, group_size, groups)
            return on_device(value, tensor, gradient=False)

        def shuffle(
            tensor: torch.Tensor,
            output_split_sizes: Sequence[int],
            input_split_sizes: Sequence[int],
            group_name: str,
        ) -> torch.Tensor:
            increment_counter("all_to_all_single")
            if len({*output_split_sizes, *input_split_sizes}) > 1:
                raise RuntimeError(
                    "torch_xla does not support arbitrary split sizes for all_to_all"
                )
            return on_device(self.shuffled(tensor, 0, 0, len(self.world)), tensor, gradient=False)

        return {
            "all_reduce": all_reduce,
            "all_gather_into_tensor": gather,
            "reduce_scatter_tensor": scatter,
            "all_to_all_single": shuffle,
        }


def is_operator(target: object) -> bool:
    """Whether the target of a node of a graph is one of `CrossReplica.operators`."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == OPS


def _variants(
    name: str, counter: str, exchange: Callable[..., list[torch.Tensor]], first: int
) -> dict[str, Callable[..., Any]]:
    """torch_xla's functions with outputs, with lists, and with both, by name.

    `exchange`: what each does on the CPU; it takes the tensors as argument number `first`.
    """

    def out(*args: Any) -> Token:
        output, tensor, token, *others = args[first:]
        increment_counter(counter)
        overwrite([output], exchange(*args[:first], [tensor], *others))
        return token

    def coalesced(*args: Any) -> list[Any]:
        tensors, token, *others = args[first:]
        values = exchange(*args[:first], tensors, *others)
        pairs = zip(values, tensors, strict=True)
        return [*(on_device(value, like, gradient=False) for value, like in pairs), token]

    def coalesced_out(*args: Any) -> Token:
        outputs, tensors, token, *others = args[first:]
        overwrite(outputs, exchange(*args[:first], tensors, *others))
        return token

    return {
        f"{name}_out": out,
        f"{name}_coalesced": coalesced,
        f"{name}_coalesced_out": coalesced_out,
    }


def describe_call(
    operation: str, tensors: Tensors, detail: str = "", groups: Groups = ()
) -> RankCall:
    """Describe the call for the comparison between ranks.

    Raises RuntimeError for a CPU tensor, as torch_xla does on a TPU.
    """
    for tensor in tensors:
        if not tensor.is_xla:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"Expected XLA tensor. Got: {tensor.type()}. torch_xla's collectives accept only "
                "tensors on the device, and so do torch.distributed's groups 'xla' and "
                "'cpu:gloo,xla:xla', which also send objects as CPU tensors. For CPU tensors and "
                "objects make a second group, `cpu = dist.new_group(backend='gloo')`, and pass "
                "group=cpu"
            )
    named = f"groups {[list(group) for group in groups]}" if groups else ""
    kinds = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
    return describe(operation, kinds, ", ".join(filter(None, (detail, named))))


def increment_counter(name: str) -> None:
    """Add one to the counter of the replaced torch_xla function (torch_xla.debug.metrics)."""
    _XLAC._xla_increment_counter(f"xla::{name}", 1)


# -- what XLA refuses


def _reduction_problem(call: RankCall, reduce_type: str, tensors: Tensors) -> str:
    """Why XLA refuses this reduction, or ''. Raises NotRehearsedError for unsupported types."""
    if reduce_type not in _OPERATIONS:
        return f"there is no reduce type {reduce_type!r}"
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        if dtype not in _REDUCED:
            raise NotRehearsedError(f"{call.operation} of {dtype}")
        if reduce_type in ("and", "or") and (dtype.is_floating_point or dtype.is_complex):
            return f"{reduce_type!r} needs bool or integer tensors"
        if reduce_type in ("min", "max") and dtype.is_complex:
            return f"complex numbers have no {reduce_type}"
    return ""


def _problem(tensors: Tensors, dim: int, name: str = "dim", shares: int = 1) -> str:
    """Why torch_xla refuses to cut or to join these tensors along a dimension, or ''.

    The same on a TPU: torch_xla checks when it adds the operation to the program.
    """
    if not tensors:
        return EMPTY_LIST
    for tensor in tensors:
        if not 0 <= dim < tensor.dim():
            return f"{name} {dim} is not in 0 … {tensor.dim() - 1}, the dimensions of the tensor"
        if tensor.shape[dim] % shares:
            shape = list(tensor.shape)
            return f"dimension {dim} of {shape} cannot be split into {shares} equal shares"
    # torch_xla ties its token to the first tensor of each type.
    firsts = {tensor.dtype: tensor for tensor in reversed(tensors)}
    return EMPTY if any(tensor.numel() == 0 for tensor in firsts.values()) else ""


# -- reductions


def _reduce(reduce_type: str, parts: Tensors) -> torch.Tensor:
    """Reduce the parts in rank order. The result has the type `REDUCED_AS`."""
    wide = (part.to(REDUCED_AS.get(part.dtype, part.dtype)) for part in parts)
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


def _broadcast_root() -> str:
    """'broadcast from rank 1' within xm.collective_broadcast, which is a sum of zeros and the root.

    Other roots on other ranks would add up several tensors, or none.
    """
    frame = sys._getframe(2)  # below xm.all_reduce, in the wrapper of the replaced function
    for outer in (frame, frame.f_back, frame.f_back and frame.f_back.f_back):
        if outer is not None and outer.f_code is xm.collective_broadcast.__code__:
            return f"broadcast from rank {locals_of(outer)['root_ordinal']}"
    return ""
