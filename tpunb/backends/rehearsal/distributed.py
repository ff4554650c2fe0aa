"""torch.distributed's collectives on gloo groups, which the ranks compare before each call.

Without it, a collective that one rank misses ends in gloo's time-out after 30 minutes, and
different shapes in wrong numbers or in the end of the process (torch 2.9 to 2.15). So operators of
c10d, below dist.*, DDP, FSDP and the functional collectives of torch.compile, get kernels that
first have the ranks of the group agree on the call over the `Wire`: a difference, a missing rank
or a deadlock is an error that names ranks and lines. The data then goes over the group's own gloo;
sums are added on the wire, which takes less time.

A kernel returns when the call is done, also with async_op=True: a rank runs its collectives in the
order of its calls, as a TPU's core does. Sends and receives are not compared.
"""

from __future__ import annotations

import ctypes
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.futures import Future

from tpunb.backends.rehearsal.call import RankCall, describe, sizes
from tpunb.backends.rehearsal.errors import MismatchError
from tpunb.backends.rehearsal.wire import REDUCED_AS, Wire
from tpunb.utils.text import describe_ranks

# Private or without a promise, as most methods of its classes (torch 2.11, 2.13 and 2.15).
_C10D: Any = torch._C._distributed_c10d
_set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame

Tensors = Sequence[torch.Tensor]
_ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)
"""Types that the wire adds as gloo does."""


@dataclass(frozen=True)
class TensorKind:
    """The tensors of one dispatch key, and how gloo gets them."""

    key: Literal["CPU", "PrivateUse1"]
    device: torch.device
    to_cpu: Callable[[torch.Tensor], torch.Tensor]
    """The tensor of the CPU on the same memory."""
    is_tpu: bool
    """If so, ranks must name equal shapes, not only as many elements, because a TPU compiles a
    program for them; and all types that a TPU has are exchanged."""
    missing: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Operators that the device's backend does not have, and what raises its error for each."""


CPU = TensorKind("CPU", torch.device("cpu"), lambda tensor: tensor, is_tpu=False)


class _Group(NamedTuple):
    """A process group whose ranks are ranks of this run."""

    wire: Wire
    members: tuple[int, ...]
    """Its ranks, in order."""
    ranks: tuple[int, ...]
    """In the order of the group, which may be another one."""
    described: str
    """'' for the group of all ranks."""
    timeout: float | None
    """Seconds, if the group was made with a time-out of its own."""


def _keep_for_ever(group: Any) -> None:
    """Keep a process group to the end of the process.

    DistributedDataParallel may hold a destroyed group last, and free it with the GIL: that waits
    for gloo's thread, which waits for the GIL to drop a tensor (torch 2.13; 1 of 6 runs hung).
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class C10dOperator(NamedTuple):
    """An operator of c10d, as this module replaces it."""

    kernel: str
    """The method of `ComparedCollectives`."""
    name: str
    """As messages name it."""
    method: str
    """Of the backend."""
    options: str
    """The class of that method's options."""
    arguments: int
    """The number of its arguments before `async_op` and, in most, `timeout`."""
    returns: bool = False
    """Whether it returns its first argument, besides the Work."""


_BASE = "_allgather_base", "AllgatherOptions"
_SCATTER_BASE = "_reduce_scatter_base", "ReduceScatterOptions"
OPERATORS = {
    "allreduce_": C10dOperator("reduce", "all_reduce", "allreduce", "AllreduceOptions", 4, True),
    "allreduce_coalesced_": C10dOperator(
        "reduce", "all_reduce_coalesced", "allreduce_coalesced", "AllreduceCoalescedOptions", 3
    ),
    "reduce_": C10dOperator("reduce", "reduce", "reduce", "ReduceOptions", 5),
    "reduce_scatter_": C10dOperator(
        "reduce_scatter", "reduce_scatter", "reduce_scatter", "ReduceScatterOptions", 4, True
    ),
    "_reduce_scatter_base_": C10dOperator(
        "reduce_scatter", "reduce_scatter_tensor", *_SCATTER_BASE, 4, True
    ),
    "reduce_scatter_tensor_coalesced_": C10dOperator(
        "reduce_scatter", "reduce_scatter_tensor_coalesced", *_SCATTER_BASE, 4
    ),
    "allgather_": C10dOperator("gather", "all_gather", "allgather", "AllgatherOptions", 3, True),
    "_allgather_base_": C10dOperator("gather", "all_gather_into_tensor", *_BASE, 3, True),
    "allgather_into_tensor_coalesced_": C10dOperator(
        "gather", "all_gather_into_tensor_coalesced", *_BASE, 3
    ),
    "allgather_coalesced_": C10dOperator(
        "gather", "all_gather_coalesced", "allgather_coalesced", "AllgatherOptions", 3
    ),
    "broadcast_": C10dOperator("broadcast", "broadcast", "broadcast", "BroadcastOptions", 4, True),
    "gather_": C10dOperator("with_root", "gather", "gather", "GatherOptions", 4),
    "scatter_": C10dOperator("with_root", "scatter", "scatter", "ScatterOptions", 4, True),
    "alltoall_base_": C10dOperator(
        "all_to_all_single", "all_to_all_single", "alltoall_base", "AllToAllOptions", 5
    ),
    "alltoall_": C10dOperator("all_to_all", "all_to_all", "alltoall", "AllToAllOptions", 3, True),
    "barrier": C10dOperator("barrier", "barrier", "barrier", "BarrierOptions", 3),
}
_PAIRWISE = ("send", "recv_")
"""Not compared. Tensors of the CPU keep torch's own kernels."""


class ComparedCollectives:
    """The kernels for tensors of one kind.

    Nothing is compared before `compare_over`, as in a process that is alone.
    """

    def __init__(self, kind: TensorKind) -> None:
        self._kind = kind
        self._wire: Wire | None = None
        self._world_size = 1
        self._groups: weakref.WeakKeyDictionary[Any, _Group | None] = weakref.WeakKeyDictionary()
        self._library = torch.library.Library("c10d", "IMPL")
        """Kept alive, because kernels live only as long as it does."""
        self._register()

    def compare_over(self, wire: Wire, world_size: int) -> None:
        """From now on, the ranks of this run compare the calls."""
        self._wire, self._world_size = wire, world_size
        self._groups.clear()

    def _register(self) -> None:
        kernels = {name: self._kernel(operator) for name, operator in OPERATORS.items()}
        if self._kind.is_tpu:
            kernels |= {name: _opaque(getattr(self, name)) for name in _PAIRWISE}
        with warnings.catch_warnings():
            # The override is intended, but torch 2.8 lacks the parameter allow_override.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, kernel in {**kernels, **self._kind.missing}.items():
                self._library.impl(name, kernel, self._kind.key)

    def _kernel(self, operator: C10dOperator) -> Callable[..., Any]:
        method, count = getattr(self, operator.kernel), operator.arguments

        def kernel(*args: Any) -> Any:
            timeout = args[count + 1] if len(args) > count + 1 else -1  # ms; -1: the group's
            method(_Call(operator, timeout), *args[:count])
            return (args[0], _done(args[0])) if operator.returns else _done(args[0])

        return _opaque(kernel)

    # -- one collective

    def _collective(
        self,
        called: _Call,
        group: Any,
        tensors: Tensors,
        exchanges: Sequence[Sequence[Any]],
        *,
        detail: str = "",
        compared: tuple[str, ...] | None = None,
        check: Callable[[_Group, RankCall], None] | None = None,
        added: torch.Tensor | None = None,
        **fields: Any,
    ) -> None:
        """Agree on the call, then run the exchanges on the group's backend.

        `exchanges`: the arguments for the backend's method. `compared`: instead of the tensors;
        `check`: called first when the ranks have agreed; `added`: what the wire sums instead of
        the backend. `fields`: of the backend's options.
        """
        found, method = self._group(group), getattr(self._backend(group), called.operator.method)

        def begin() -> list[Any]:
            return [method(*arguments, called.options(fields)) for arguments in exchanges]

        if found is None:
            for work in begin():
                work.wait()
            return
        name = f"{called.operator.name} {called.reduction}".rstrip()
        detail = ", ".join(filter(None, (detail, found.described)))
        kinds = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if compared is None and not self._kind.is_tpu:
            compared = sizes(kinds)
        call = describe(name, kinds, detail, " on tpu" if self._kind.is_tpu else "", compared)
        refused: BaseException | None = None
        limit = found.timeout if called.timeout < 0 else called.timeout / 1000
        with found.wire.exchange(call, found.members, added, limit):
            if check is not None:
                check(found, call)
            if added is not None:
                found.wire.all_reduce(added, found.members, call)
                return
            try:
                works = begin()
            except Exception as error:  # of the arguments, on all ranks: they still agree
                refused = error
            else:
                refused = found.wire.wait(works, found.members, call)
        if refused is not None:
            raise refused

    def _backend(self, group: Any) -> Any:
        return _C10D.ProcessGroup.unbox(group)._get_backend(self._kind.device)

    def _group(self, boxed: Any) -> _Group | None:
        """The group as ranks of this run; None if it is not one of them, or not of gloo."""
        group = _C10D.ProcessGroup.unbox(boxed)
        if group not in self._groups:
            self._groups[group] = self._look_up(group)
            _keep_for_ever(group)
        return self._groups[group]

    def _look_up(self, group: Any) -> _Group | None:
        wire, backend = self._wire, group._get_backend(self._kind.device)
        if wire is None or wire.in_child or not isinstance(backend, _C10D.ProcessGroupGloo):
            return None
        if (dist.get_rank(), dist.get_world_size()) != (wire.rank, self._world_size):
            return None
        ranks = tuple(dist.get_process_group_ranks(group))
        timeout = backend.options._timeout
        limit = None if timeout == dist.default_pg_timeout else timeout.total_seconds()
        described = ""
        if group is not dist.group.WORLD:
            described = f"group {group.group_name[:8]} of ranks {list(ranks)}"
        return _Group(wire, tuple(sorted(ranks)), ranks, described, limit)

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor as gloo moves it, of a TPU as bytes: gloo does not know all types. The bytes
        are a copy if the tensor is not contiguous.
        """
        value = self._kind.to_cpu(value)
        return _flat(value.contiguous()).view(torch.uint8) if self._kind.is_tpu else value

    def _keep_moved(self, tensors: Any, values: Any) -> None:
        """Copy what was received into tensors that are not contiguous."""
        for tensor, value in zip(_all(tensors), _all(values), strict=True):
            if self._kind.is_tpu and not tensor.is_contiguous():
                self._kind.to_cpu(tensor).copy_(value.view(tensor.dtype).view(tensor.shape))

    def _wide(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor as gloo reduces it, of a TPU in the type in which that is done."""
        value = self._kind.to_cpu(value)
        if not self._kind.is_tpu:
            return value
        return value.to(REDUCED_AS.get(value.dtype, value.dtype)).contiguous()

    def _root(self, preposition: str, group: Any, root: int) -> str:
        found = self._group(group)
        known = found is not None and 0 <= root < len(found.ranks)
        return f"{preposition} rank {found.ranks[root] if found and known else root}"

    def _misfit(self, parts: Any, own: Any, group: Any) -> str:
        """What gloo refuses, or '': parts that do not hold this rank's tensors once for each rank.

        Compared, because it may be so on one rank only, for which the others would wait.
        """
        size, kinds = self._backend(group).size(), [(t.dtype, t.numel()) for t in _all(own)]
        found = [(t.dtype, t.numel()) for t in _all(parts)]
        if found in (kinds * size, [(dtype, size * count) for dtype, count in kinds]):
            return ""
        return f"parts: {', '.join(sizes(tuple((t.dtype, t.shape) for t in _all(parts))))}"

    # -- reductions

    def reduce(self, called: _Call, tensors: Tensors, group: Any, op: Any, *others: Any) -> None:
        """In place. `others`: sparse indices, of which gloo has none; or a root, and its tensor."""
        reduction, values = _Reduction.of(op), _each(self._wide, tensors)
        fields: dict[str, Any] = {"reduceOp": reduction.sent}
        root = others[0] if called.operator.name == "reduce" else None
        if root is not None:
            fields |= {"rootRank": root, "rootTensor": others[1]}
            fields["detail"] = self._root("to", group, root)
        elif called.operator.name == "all_reduce" and reduction.is_sum and _is_added(values):
            fields["added"] = _flat(values[0])
        called = called._replace(reduction=reduction.name)
        self._collective(called, group, tensors, [(values,)], **fields)
        if root is None or self._backend(group).rank() == root:
            self._keep_reduced(reduction, group, tensors, values)

    def reduce_scatter(
        self, called: _Call, outputs: Any, inputs: Any, group: Any, reduce_op: Any
    ) -> None:
        """Reduce the inputs, and keep this rank's part."""
        reduction, pairs = _Reduction.of(reduce_op), called.pairs(outputs, inputs)
        wide = [_each(self._wide, pair) for pair in pairs]
        called = called._replace(reduction=reduction.name)
        detail, sent = self._misfit(inputs, outputs, group), reduction.sent
        self._collective(called, group, _all(inputs), wide, detail=detail, reduceOp=sent)
        for (output, _), (result, _) in zip(pairs, wide, strict=True):
            self._keep_reduced(reduction, group, output, result)

    def _keep_reduced(self, reduction: _Reduction, group: Any, tensors: Any, values: Any) -> None:
        """Finish a reduction, and copy what was reduced in a wider type, or in a copy."""
        for tensor, value in zip(_all(tensors), _all(values), strict=True):
            if reduction.is_average:
                value.div_(self._backend(group).size())
            if value.dtype != tensor.dtype or (self._kind.is_tpu and not tensor.is_contiguous()):
                self._kind.to_cpu(tensor).copy_(value)

    # -- what is moved

    def gather(self, called: _Call, outputs: Any, inputs: Any, group: Any) -> None:
        """All ranks get the tensors of all."""
        pairs = called.pairs(outputs, inputs)
        moved = [_each(self._moved, pair) for pair in pairs]
        detail = self._misfit(outputs, inputs, group)
        self._collective(called, group, _all(inputs), moved, detail=detail)
        self._keep_moved([output for output, _ in pairs], [result for result, _ in moved])

    def broadcast(
        self, called: _Call, tensors: Tensors, group: Any, root: int, root_tensor: int
    ) -> None:
        """All ranks get the root's."""
        fields: dict[str, Any] = {"rootRank": root, "rootTensor": root_tensor}
        fields["detail"] = self._root("from", group, root)
        values = _each(self._moved, tensors)
        self._collective(called, group, tensors, [(values,)], **fields)
        self._keep_moved(tensors, values)

    def with_root(self, called: _Call, outputs: Any, inputs: Any, group: Any, root: int) -> None:
        """The root gathers or scatters."""
        gathers = called.operator.name == "gather"
        detail = self._root("to" if gathers else "from", group, root)
        described, parts = (inputs, outputs) if gathers else (outputs, inputs)
        if parts and (misfit := self._misfit(parts, described, group)):
            detail = f"{detail}, {misfit}"
        results, values = _each(self._moved, (outputs, inputs))
        exchange = [(results, values)]
        self._collective(called, group, described, exchange, detail=detail, rootRank=root)
        self._keep_moved(outputs, results)

    def all_to_all_single(
        self,
        called: _Call,
        output: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> None:
        """Parts of different sizes: for each pair of ranks, what is sent must be expected."""
        size = self._backend(group).size()
        sent = _elements(value, input_splits, size)
        expected = _elements(output, output_splits, size)
        splits, (result, moved) = [output_splits, input_splits], _each(self._moved, (output, value))
        if self._kind.is_tpu:
            splits = [[value.itemsize * each for each in parts] for parts in (expected, sent)]
        exchange = (result, moved, *map(list, splits))
        self._exchange_parts(called, group, [value], exchange, sent, expected)
        self._keep_moved(output, result)

    def all_to_all(self, called: _Call, outputs: Tensors, inputs: Tensors, group: Any) -> None:
        """The same with a tensor for each part."""
        if not all(tensor.is_contiguous() for tensor in (*outputs, *inputs)):
            raise ValueError("all_to_all needs contiguous tensors")
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
        results, values = _each(self._moved, (outputs, inputs))
        if not self._kind.is_tpu:
            self._exchange_parts(called, group, inputs, (results, values), sent, expected)
            return
        # gloo wants lists of equal tensors, if it takes lists at all.
        called = called._replace(operator=called.operator._replace(method="alltoall_base"))
        flat = torch.cat(values)
        splits = [result.numel() for result in results], [value.numel() for value in values]
        received = flat.new_empty(sum(splits[0]))
        self._exchange_parts(called, group, inputs, (received, flat, *splits), sent, expected)
        for result, part in zip(results, received.split(splits[0]), strict=True):
            result.copy_(part)

    def _exchange_parts(
        self,
        called: _Call,
        group: Any,
        tensors: Tensors,
        exchange: Sequence[Any],
        sent: Sequence[int],
        expected: Sequence[int],
    ) -> None:
        compared, check = (str(tensors[0].dtype),), functools.partial(_check_splits, sent, expected)
        self._collective(called, group, tensors, [exchange], compared=compared, check=check)

    def barrier(
        self, called: _Call, tensor: torch.Tensor, group: Any, device_ids: Sequence[int]
    ) -> None:
        """Wait until all ranks have agreed on the call, which is a barrier already."""
        self._collective(called, group, (), [()] if self._group(group) is None else [])

    # -- pairs of ranks

    def send(self, tensors: Tensors, group: Any, target: int, tag: int) -> Any:
        work = self._backend(group).send(self._in_place(tensors), target, tag)
        return dist.Work.boxed(work)

    def recv_(self, tensors: Tensors, group: Any, source: int, tag: int) -> Any:
        work = self._backend(group).recv(self._in_place(tensors), source, tag)
        return dist.Work.boxed(work)

    def _in_place(self, tensors: Tensors) -> Any:
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("send and recv need contiguous tensors")  # as gloo's own
        return _each(self._moved, tensors)


class _Call(NamedTuple):
    """A call of an operator."""

    operator: C10dOperator
    timeout: int
    """In ms; -1: the group's."""
    reduction: str = ""

    def options(self, fields: Mapping[str, Any]) -> Any:
        """The options for the backend's method."""
        options = getattr(_C10D, self.operator.options)()
        options.timeout = timedelta(milliseconds=self.timeout)
        for option, value in fields.items():
            setattr(options, option, value)
        return options

    def pairs(self, outputs: Any, inputs: Any) -> Sequence[tuple[Any, Any]]:
        """The arguments of the exchanges: lists are taken apart for a method that has none."""
        apart = self.operator.method.endswith("_base") and not isinstance(inputs, torch.Tensor)
        return list(zip(outputs, inputs, strict=True)) if apart else [(outputs, inputs)]


@dataclass(frozen=True)
class _Reduction:
    """A ReduceOp. Averages are sums that are divided, as gloo does it."""

    kind: Any

    @classmethod
    def of(cls, boxed: Any) -> _Reduction:
        return cls(dist.ReduceOp.RedOpType(boxed.op()))

    @property
    def name(self) -> str:
        return str(self.kind.name).lower()

    @property
    def is_average(self) -> bool:
        return bool(self.kind == dist.ReduceOp.AVG)

    @property
    def is_sum(self) -> bool:
        return self.is_average or bool(self.kind == dist.ReduceOp.SUM)

    @property
    def sent(self) -> Any:
        return dist.ReduceOp(dist.ReduceOp.SUM if self.is_average else self.kind)


def _flat(value: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension. A view of one element could keep a stride of 0."""
    return value.as_strided((value.numel(),), (1,))


def _is_added(values: Tensors) -> bool:
    return len(values) == 1 and values[0].dtype in _ADDED and values[0].is_contiguous()


def _each(convert: Callable[[torch.Tensor], torch.Tensor], tensors: Any) -> Any:
    """Convert a tensor, or those in lists of lists."""
    if isinstance(tensors, torch.Tensor):
        return convert(tensors)
    return [_each(convert, tensor) for tensor in tensors]


def _all(tensors: Any) -> list[torch.Tensor]:
    """The tensors in lists of lists, in order."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _all(part)]


def _check_splits(
    sent: Sequence[int], expected: Sequence[int], group: _Group, call: RankCall
) -> None:
    """Compare what each rank sends to each with what that one expects."""
    rows = group.wire.all_gather(torch.tensor([*sent, *expected]), group.members, call)
    by_rank = dict(zip(group.members, rows, strict=True))
    table = [by_rank[rank].tolist() for rank in group.ranks]
    size = len(group.ranks)
    names = [describe_ranks([rank]) for rank in group.ranks]
    wrong = [
        f"  {names[source]} sends {table[source][target]} elements to {names[target]}, which "
        f"expects {table[target][size + source]}"
        for source in range(size)
        for target in range(size)
        if table[source][target] != table[target][size + source]
    ]
    if wrong:
        raise MismatchError("\n".join([f"the parts of {call} do not fit:", *wrong]))


def _elements(tensor: torch.Tensor, splits: Sequence[int], size: int) -> list[int]:
    """The elements of each part: `splits` are rows, and empty for equal parts."""
    if not splits:
        return [tensor.numel() // size] * size
    row = math.prod(tensor.shape[1:])
    return [rows * row for rows in splits]


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return dist.Work.boxed(_C10D._create_work_from_future(future))


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """As torch's own kernels, in C++: neither differentiated nor traced by dynamo.

    (torch.compiler.disable would import dynamo, which takes seconds.)
    """

    @functools.wraps(function)
    def kernel(*args: Any) -> Any:
        traced = _set_eval_frame(None)
        try:
            with torch.no_grad():
                return function(*args)
        finally:
            _set_eval_frame(traced)

    return kernel


def can_compare() -> bool:
    """Whether kernels in Python can read a ReduceOp: from torch 2.11 on, not in 2.9."""
    schemas: Any = torch._C._jit_get_custom_class_schemas  # type: ignore[attr-defined]
    methods = map(str, schemas())
    return any(method.startswith("op(") and "c10d.ReduceOp" in method for method in methods)


_collectives: dict[str, ComparedCollectives] = {}
"""By dispatch key, which takes one kernel for each operator."""


def install_collectives(kind: TensorKind) -> ComparedCollectives:
    """Replace c10d's kernels for tensors of this kind, once in a process and its forks."""
    if kind.key not in _collectives:
        _collectives[kind.key] = ComparedCollectives(kind)
    return _collectives[kind.key]
