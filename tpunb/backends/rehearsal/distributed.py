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

from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.errors import MismatchError
from tpunb.backends.rehearsal.wire import Wire
from tpunb.utils.text import describe_ranks

# Private or without a promise, as most methods of its classes (torch 2.11, 2.13 and 2.15).
_C10D: Any = torch._C._distributed_c10d
_set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame

Tensors = Sequence[torch.Tensor]
_ADDED = (torch.float32, torch.float64, torch.int32, torch.int64)
"""Types that the wire adds as gloo does."""
_WIDER = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""The types in which a TPU's values are reduced: as a TPU does, or because gloo lacks their own."""


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


class ComparedCollectives:
    """The kernels for tensors of one kind. Names of methods are those of operators.

    Nothing is compared before `compare_over`, as in a process that is alone.
    """

    OPERATORS = (
        *("allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "barrier"),
        *("allgather_", "_allgather_base_", "allgather_coalesced_"),
        *("allgather_into_tensor_coalesced_", "gather_", "scatter_", "alltoall_", "alltoall_base_"),
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    )
    PAIRWISE = ("send", "recv_")
    """Not compared. Tensors of the CPU keep torch's own kernels."""

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
        operators = self.OPERATORS + (self.PAIRWISE if self._kind.is_tpu else ())
        with warnings.catch_warnings():
            # The override is intended, but torch 2.8 lacks the parameter allow_override.
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            kernels = {name: _kernel(getattr(self, name)) for name in operators}
            for name, kernel in {**kernels, **self._kind.missing}.items():
                self._library.impl(name, kernel, self._kind.key)

    # -- one collective

    def _collective(
        self,
        operation: str,
        group: Any,
        tensors: Tensors,
        exchanges: Sequence[tuple[Any, ...]],
        *,
        detail: str = "",
        timeout: int = -1,
        compared: tuple[str, ...] | None = None,
        check: Callable[[_Group, RankCall], None] | None = None,
    ) -> None:
        """Agree on the call, then run the exchanges on the group's backend.

        `exchanges`: methods of the backend with their arguments. `compared`: instead of the
        tensors; `check`: called first when the ranks have agreed.
        """
        found, backend = self._group(group), self._backend(group)
        if found is None:
            for method, *arguments in exchanges:
                getattr(backend, method)(*arguments).wait()
            return
        call = self._call(operation, tensors, detail, found, compared)
        refused: BaseException | None
        with found.wire.exchange(call, found.members, timeout=_limit(timeout, found)):
            if check is not None:
                check(found, call)
            try:
                works = [getattr(backend, method)(*arguments) for method, *arguments in exchanges]
            except Exception as error:  # of the arguments, on all ranks: they still agree
                refused = error
            else:
                refused = found.wire.wait(works, found.members, call)
        if refused is not None:
            raise refused

    def _call(
        self,
        operation: str,
        tensors: Tensors,
        detail: str,
        group: _Group,
        compared: tuple[str, ...] | None,
    ) -> RankCall:
        detail = ", ".join(filter(None, (detail, group.described)))
        kinds = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        return _call(operation, kinds, detail, self._kind.is_tpu, compared)

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

    def _cpu(self, tensors: Any) -> Any:
        """The tensors, in lists of lists, as gloo reads and writes them."""
        if isinstance(tensors, torch.Tensor):
            return self._kind.to_cpu(tensors)
        return [self._cpu(tensor) for tensor in tensors]

    def _moved(self, tensors: Any) -> Any:
        """As `_cpu`, of a TPU as bytes: gloo does not know all types."""
        if not isinstance(tensors, torch.Tensor):
            return [self._moved(tensor) for tensor in tensors]
        value = self._kind.to_cpu(tensors)
        if self._kind.is_tpu and value.is_contiguous():
            value = _flat(value).view(torch.uint8)
        return value

    def _wide(self, tensors: Any) -> Any:
        """As `_cpu`, in the type in which they are reduced."""
        if not isinstance(tensors, torch.Tensor):
            return [self._wide(tensor) for tensor in tensors]
        value = self._kind.to_cpu(tensors)
        return value.to(_WIDER.get(value.dtype, value.dtype)) if self._kind.is_tpu else value

    # -- reductions

    def allreduce_(
        self,
        tensors: Tensors,
        group: Any,
        reduce_op: Any,
        sparse_indices: Any = None,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        reduction = _Reduction.of(reduce_op)
        values = self._wide(tensors)
        found = self._group(group)
        if found is not None and reduction.is_sum and _is_added(values):
            call = self._call(f"all_reduce {reduction.name}", tensors, "", found, None)
            flat, members = _flat(values[0]), found.members
            with found.wire.exchange(call, members, flat, timeout=_limit(timeout, found)):
                found.wire.all_reduce(flat, members, call)
        else:
            options = _options("AllreduceOptions", timeout, reduceOp=reduction.sent)
            self._collective(
                f"all_reduce {reduction.name}",
                group,
                tensors,
                [("allreduce", values, options)],
                timeout=timeout,
            )
        self._keep_reduced(reduction, group, tensors, values)
        return tensors, _done(tensors)

    def allreduce_coalesced_(
        self, tensors: Tensors, group: Any, reduce_op: Any, async_op: bool = True, timeout: int = -1
    ) -> Any:
        reduction, values = _Reduction.of(reduce_op), self._wide(tensors)
        options = _options("AllreduceCoalescedOptions", timeout, reduceOp=reduction.sent)
        self._collective(
            f"all_reduce_coalesced {reduction.name}",
            group,
            tensors,
            [("allreduce_coalesced", values, options)],
            timeout=timeout,
        )
        self._keep_reduced(reduction, group, tensors, values)
        return _done(tensors)

    def reduce_(
        self,
        tensors: Tensors,
        group: Any,
        reduce_op: Any,
        root_rank: int,
        root_tensor: int,
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        reduction, values = _Reduction.of(reduce_op), self._wide(tensors)
        root = {"rootRank": root_rank, "rootTensor": root_tensor}
        options = _options("ReduceOptions", timeout, reduceOp=reduction.sent, **root)
        self._collective(
            f"reduce {reduction.name}",
            group,
            tensors,
            [("reduce", values, options)],
            detail=self._root("to", group, root_rank),
            timeout=timeout,
        )
        if self._backend(group).rank() == root_rank:
            self._keep_reduced(reduction, group, tensors, values)
        return _done(tensors)

    def reduce_scatter_(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensors],
        group: Any,
        reduce_op: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        flat = [tensor for parts in inputs for tensor in parts]
        pairs = [(outputs, inputs)]
        self._scatter_reduced("reduce_scatter", pairs, flat, group, reduce_op, timeout)
        return outputs, _done(outputs)

    def _reduce_scatter_base_(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        reduce_op: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        name, pairs = "reduce_scatter_tensor", [(output, value)]
        self._scatter_reduced(name, pairs, [value], group, reduce_op, timeout)
        return output, _done(output)

    def reduce_scatter_tensor_coalesced_(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: Any,
        reduce_op: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        name, pairs = "reduce_scatter_tensor_coalesced", list(zip(outputs, inputs, strict=True))
        self._scatter_reduced(name, pairs, inputs, group, reduce_op, timeout)
        return _done(outputs)

    def _scatter_reduced(
        self,
        name: str,
        pairs: Sequence[tuple[Any, Any]],
        described: Tensors,
        group: Any,
        reduce_op: Any,
        timeout: int,
    ) -> None:
        """Reduce the second of each pair, and keep this rank's part in the first."""
        reduction = _Reduction.of(reduce_op)
        options = _options("ReduceScatterOptions", timeout, reduceOp=reduction.sent)
        method = "reduce_scatter" if name == "reduce_scatter" else "_reduce_scatter_base"
        wide = [(self._wide(output), self._wide(value)) for output, value in pairs]
        exchanges = [(method, *pair, options) for pair in wide]
        self._collective(f"{name} {reduction.name}", group, described, exchanges, timeout=timeout)
        for (output, _), (result, _) in zip(pairs, wide, strict=True):
            self._keep_reduced(reduction, group, output, result)

    def _keep_reduced(self, reduction: _Reduction, group: Any, tensors: Any, values: Any) -> None:
        """Finish a reduction, and copy what was reduced in a wider type."""
        if not isinstance(tensors, torch.Tensor):
            for tensor, value in zip(tensors, values, strict=True):
                self._keep_reduced(reduction, group, tensor, value)
            return
        if reduction.is_average:
            values.div_(self._backend(group).size())
        if values.dtype != tensors.dtype:
            self._kind.to_cpu(tensors).copy_(values)

    # -- what is moved

    def broadcast_(
        self,
        tensors: Tensors,
        group: Any,
        root_rank: int,
        root_tensor: int,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        values = self._moved(tensors)
        options = _options("BroadcastOptions", timeout, rootRank=root_rank, rootTensor=root_tensor)
        self._collective(
            "broadcast",
            group,
            tensors,
            [("broadcast", values, options)],
            detail=self._root("from", group, root_rank),
            timeout=timeout,
        )
        return tensors, _done(tensors)

    def allgather_(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        group: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        results, values = self._moved(outputs), self._moved(inputs)
        options = _options("AllgatherOptions", timeout)
        self._collective(
            "all_gather", group, inputs, [("allgather", results, values, options)], timeout=timeout
        )
        return outputs, _done(outputs)

    def _allgather_base_(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        self._gather_each("all_gather_into_tensor", [output], [value], group, timeout)
        return output, _done(output)

    def allgather_into_tensor_coalesced_(
        self, outputs: Tensors, inputs: Tensors, group: Any, async_op: bool = True
    ) -> Any:
        self._gather_each("all_gather_into_tensor_coalesced", outputs, inputs, group, -1)
        return _done(outputs)

    def _gather_each(
        self, name: str, outputs: Tensors, inputs: Tensors, group: Any, timeout: int
    ) -> None:
        pairs = list(zip(self._moved(outputs), self._moved(inputs), strict=True))
        options = _options("AllgatherOptions", timeout)
        self._collective(
            name,
            group,
            inputs,
            [("_allgather_base", *pair, options) for pair in pairs],
            timeout=timeout,
        )

    def allgather_coalesced_(
        self, outputs: Sequence[Tensors], inputs: Tensors, group: Any, async_op: bool = True
    ) -> Any:
        results, values = self._moved(outputs), self._moved(inputs)
        self._collective(
            "all_gather_coalesced", group, inputs, [("allgather_coalesced", results, values)]
        )
        return _done(outputs)

    def gather_(
        self,
        outputs: Sequence[Tensors],
        inputs: Tensors,
        group: Any,
        root_rank: int,
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        results, values = self._moved(outputs), self._moved(inputs)
        options = _options("GatherOptions", timeout, rootRank=root_rank)
        self._collective(
            "gather",
            group,
            inputs,
            [("gather", results, values, options)],
            detail=self._root("to", group, root_rank),
            timeout=timeout,
        )
        return _done(outputs)

    def scatter_(
        self,
        outputs: Tensors,
        inputs: Sequence[Tensors],
        group: Any,
        root_rank: int,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        results, values = self._moved(outputs), self._moved(inputs)
        options = _options("ScatterOptions", timeout, rootRank=root_rank)
        self._collective(
            "scatter",
            group,
            outputs,
            [("scatter", results, values, options)],
            detail=self._root("from", group, root_rank),
            timeout=timeout,
        )
        return outputs, _done(outputs)

    def alltoall_base_(
        self,
        output: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        """Parts of different sizes: for each pair of ranks, what is sent must be expected."""
        size = self._backend(group).size()
        sent = _elements(value, input_splits, size)
        expected = _elements(output, output_splits, size)
        options = _options("AllToAllOptions", timeout)
        bytewise = self._kind.is_tpu and value.is_contiguous() and output.is_contiguous()
        splits = list(output_splits), list(input_splits)
        if bytewise:
            unit = value.itemsize
            splits = [unit * each for each in expected], [unit * each for each in sent]
        read: Any = self._moved if bytewise else self._cpu
        result, source = read(output), read(value)
        self._collective(
            "all_to_all_single",
            group,
            [value],
            [("alltoall_base", result, source, *splits, options)],
            timeout=timeout,
            compared=(str(value.dtype),),
            check=functools.partial(_check_splits, sent, expected),
        )
        return _done(output)

    def alltoall_(
        self,
        outputs: Tensors,
        inputs: Tensors,
        group: Any,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Any, Any]:
        if not all(tensor.is_contiguous() for tensor in (*outputs, *inputs)):
            raise ValueError("all_to_all needs contiguous tensors")
        sent, expected = [t.numel() for t in inputs], [t.numel() for t in outputs]
        results, values = self._moved(outputs), self._moved(inputs)
        options = _options("AllToAllOptions", timeout)
        exchange: tuple[Any, ...] = ("alltoall", results, values, options)
        if self._kind.is_tpu:  # gloo wants lists of equal tensors, if it takes lists at all
            flat = torch.cat(values)
            splits = [result.numel() for result in results], [value.numel() for value in values]
            received = flat.new_empty(sum(splits[0]))
            exchange = ("alltoall_base", received, flat, *splits, options)
        self._collective(
            "all_to_all",
            group,
            inputs,
            [exchange],
            timeout=timeout,
            compared=(str(inputs[0].dtype),),
            check=functools.partial(_check_splits, sent, expected),
        )
        if self._kind.is_tpu:
            for result, part in zip(results, received.split(splits[0]), strict=True):
                result.copy_(part)
        return outputs, _done(outputs)

    def barrier(
        self,
        tensor: torch.Tensor,
        group: Any,
        device_ids: Sequence[int],
        async_op: bool = True,
        timeout: int = -1,
    ) -> Any:
        """The agreement is one."""
        options = _options("BarrierOptions", timeout)
        alone = self._group(group) is None
        self._collective(
            "barrier", group, (), [("barrier", options)] if alone else [], timeout=timeout
        )
        return _done([tensor])

    # -- pairs of ranks

    def send(self, tensors: Tensors, group: Any, target: int, tag: int) -> Any:
        work = self._backend(group).send(self._moved(tensors), target, tag)
        return dist.Work.boxed(work)

    def recv_(self, tensors: Tensors, group: Any, source: int, tag: int) -> Any:
        work = self._backend(group).recv(self._moved(tensors), source, tag)
        return dist.Work.boxed(work)

    def _root(self, preposition: str, group: Any, root: int) -> str:
        found = self._group(group)
        known = found is not None and 0 <= root < len(found.ranks)
        return f"{preposition} rank {found.ranks[root] if found and known else root}"


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


def _options(name: str, timeout: int, **fields: Any) -> Any:
    """Options of a collective; `timeout` in ms, -1: the group's."""
    options = getattr(_C10D, name)()
    options.timeout = timedelta(milliseconds=timeout)
    for option, value in fields.items():
        setattr(options, option, value)
    return options


def _limit(timeout: int, group: _Group) -> float | None:
    return group.timeout if timeout < 0 else timeout / 1000


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return dist.Work.boxed(_C10D._create_work_from_future(future))


@functools.lru_cache(maxsize=512)
def _call(
    operation: str,
    kinds: Sequence[tuple[torch.dtype, torch.Size]],
    detail: str,
    is_tpu: bool,
    compared: tuple[str, ...] | None,
) -> RankCall:
    """Build a call. Cached: each step repeats its calls."""
    names = [str(dtype).removeprefix("torch.") for dtype, _ in kinds]
    on = " on tpu" if is_tpu else ""
    shapes = [shape for _, shape in kinds]
    tensors = tuple(f"{name}{list(shape)}{on}" for name, shape in zip(names, shapes, strict=True))
    if compared is None and not is_tpu:
        compared = tuple(f"{n} {math.prod(s)}" for n, s in zip(names, shapes, strict=True))
    return RankCall(operation, tensors, detail, compared=compared)


def _kernel(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def kernel(*args: Any, **options: Any) -> Any:
        # As torch's own kernels, in C++, it is neither differentiated nor traced by dynamo
        # (torch.compiler.disable would import dynamo, which takes seconds).
        traced = _set_eval_frame(None)
        try:
            with torch.no_grad():
                return method(*args, **options)
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
