"""Runs an operation of the device with the CPU's kernel, on CPU aliases of the same memory.

What an operation needs is read from its schema once: which arguments it writes, what it returns,
whether it draws random numbers. Conjugate and negative bits reach only the operations that torch
lets handle them (its fallbacks for the other ones clear the bits before), so most need not look
at their arguments. Any may return one: linalg.lu_solve does.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tpunb.backends.torchtpu.rehearsal import seeds
from tpunb.backends.torchtpu.rehearsal.aliases import bare_cpu, bare_tpu, on_tpu, to_cpu, to_tpu

Kernel = Callable[..., Any]
Returned = tuple[int, str] | None
"""Position and name of the argument that an operation returns; None: a new value."""

_C: Any = torch._C
KEY: Any = _C.DispatchKey.CPU
_Tensor = torch.Tensor
_CPU_DEVICE = torch.device("cpu")
_has_kernel: Any = _C._dispatch_has_kernel_for_dispatch_key
_has_computed_kernel: Any = _C._dispatch_has_computed_kernel_for_dispatch_key
_share_storage: Any = _C._is_alias_of
_count_writes: Any = torch.autograd.graph.increment_version
_modes_enabled: Any = _C._is_torch_function_mode_enabled


def cpu_kernel(op: Any) -> Kernel:
    """The CPU's kernel of an operation: without autocast, autograd and modes.

    A mode for torch functions (`with torch.device("tpu")` is one) has seen the user's call.
    """
    call = _direct(op)

    def checked(*args: Any, **kwargs: Any) -> Any:
        if _modes_enabled():
            with _C.DisableTorchFunction():
                return call(*args, **kwargs)
        return call(*args, **kwargs)

    return checked


def _direct(op: Any) -> Kernel:
    """A call that skips the dispatcher, which crashes if the kernel is not the CPU's own."""
    own = _has_kernel(op.name(), "CPU")
    return functools.partial(op._op_dk, KEY) if own else op._op


_set: Kernel = cpu_kernel(torch.ops.aten.set_.source_Storage_storage_offset)
_as_strided: Kernel = cpu_kernel(torch.ops.aten.as_strided.default)
_empty: Kernel = cpu_kernel(torch.ops.aten.empty.memory_format)


def swap(value: torch.Tensor, new: torch.Tensor) -> None:
    """Give a tensor on the device the memory and the shape of another one there."""
    _set(value, new.untyped_storage(), new.storage_offset(), new.shape, new.stride())


def mixed_devices(op: Any, value: torch.Tensor) -> RuntimeError:
    """The error for a tensor that is elsewhere."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but {op.__name__.partition('.')[0]} got "
        f"one of shape {tuple(value.shape)} on {value.device} and others on tpu:0. Move it with "
        '.to("tpu")'
    )


def check_device(device: torch.device | None) -> None:
    """Refuse a second TPU core: each process has one."""
    if device is not None and device.index:
        raise RuntimeError(
            f"There is no device {str(device)!r}: each process has one TPU core, which is tpu:0 "
            'in each of them. Use torch.device("tpu")'
        )


def make_kernel(op: Any) -> Kernel:
    """The device's kernel of an operation."""
    name = op.name()
    if not _has_computed_kernel(name, "CPU"):
        return _missing(op)
    schema = op._schema
    returned = [_returned(schema, value) for value in schema.returns]
    bits = any(_has_kernel(name, key) for key in ("Conjugate", "Negative"))
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    plain = not any("List" in str(a.type) or str(a.type) == "Device" for a in schema.arguments)
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    tensor = [str(value.type) for value in schema.returns] == ["Tensor"]
    if tensor and not (bits or written or seeded):
        return _new_tensor(op, plain)
    kernel = _general(op, bits, seeded, [a.name for a in schema.arguments if a.is_out], returned)
    lists = [n for n, a in enumerate(schema.arguments) if a in written and "List" in str(a.type)]
    return _counting(kernel, lists) if lists and not any(a.is_out for a in written) else kernel


def _counting(kernel: Kernel, lists: Sequence[int]) -> Kernel:
    """Count the writes to lists of tensors: torch leaves their version counters to the kernels."""

    def counting(*args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        for position in lists:
            _count_writes([t for t in args[position] if not t.is_cpu])
        return result

    return counting


def _returned(schema: Any, value: Any) -> Returned:
    if value.alias_info is None or not value.alias_info.is_write:
        return None
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set & value.alias_info.before_set:
            return position, argument.name
    return None


def _missing(op: Any) -> Kernel:
    reason = "on the CPU, which rehearses it, torch lacks it"
    if op.__name__.startswith("batch_norm_stats"):
        reason = (
            "TorchTPU 0.2.0 has no SyncBatchNorm. Use BatchNorm, with each core's own statistics, "
            "or GroupNorm"
        )

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # torch's own type for what a device lacks, which libraries catch.
        raise NotImplementedError(f"{op.name()} is not implemented on a rehearsed TPU: {reason}")

    return kernel


def _convert(op: Any, alias: Kernel) -> Kernel:
    def convert(value: Any) -> Any:
        if isinstance(value, _Tensor):
            if not value.is_cpu:
                return alias(value)
            if value.dim():
                raise mixed_devices(op, value)
            return value
        if isinstance(value, (list, tuple)):
            return [
                alias(item) if isinstance(item, _Tensor) and not item.is_cpu else convert(item)
                for item in value
            ]
        if isinstance(value, torch.device):
            check_device(value)
            return _CPU_DEVICE
        return value

    return convert


def _new_tensor(op: Any, plain: bool) -> Kernel:
    """Of the many operations that write nothing and return one tensor: as little as possible."""
    call, convert = _direct(op), _convert(op, bare_cpu)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        cpu = []
        for value in args:
            if isinstance(value, _Tensor):
                if not value.is_cpu:
                    value = bare_cpu(value)
                elif value.dim():
                    raise mixed_devices(op, value)
            elif not plain:
                value = convert(value)
            cpu.append(value)
        if kwargs:
            kwargs = {name: convert(value) for name, value in kwargs.items()}
        if _modes_enabled():
            with _C.DisableTorchFunction():
                result = call(*cpu, **kwargs)
        else:
            result = call(*cpu, **kwargs)
        return new_tensor(result)

    return kernel


def new_tensor(result: Any) -> Any:
    """A kernel's result on the device; None if it was not asked for."""
    try:
        return None if result is None else to_tpu(result)
    except (RuntimeError, BufferError):
        if result.layout is torch.strided and not result.is_quantized:
            raise
        kind = "quantized" if result.is_quantized else str(result.layout).removeprefix("torch.")
        raise not_dense(kind) from None


# DLPack has dense tensors only, and this is torch's own type for what a layout lacks.
def not_dense(kind: str) -> NotImplementedError:
    """The error for a tensor that DLPack cannot describe."""
    return NotImplementedError(
        f"A {kind} tensor cannot be on a rehearsed TPU. Use dense tensors: sparse=False of "
        "nn.Embedding, .to_dense()"
    )


def _general(
    op: Any, bits: bool, seeded: bool, outs: Sequence[str], returned: Sequence[Returned]
) -> Kernel:
    call = cpu_kernel(op)
    if seeded:
        call = seeds.seed(op, call)
    if outs:
        call = _writing_outs(call, outs)
    alias = to_cpu if bits else bare_cpu
    convert = _convert(op, alias)
    tensors = [a for a in op._schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    writes = any(returned) and len(tensors) > 1
    several = len(returned) > 1

    def back(result: Any, where: Returned, args: Any, kwargs: Any) -> Any:
        if where is not None:
            position, name = where
            return kwargs[name] if name in kwargs else args[position]
        if isinstance(result, _Tensor):
            return new_tensor(result)
        if isinstance(result, (list, tuple)):
            return [back(item, None, args, kwargs) for item in result]
        return result

    def kernel(*args: Any, **kwargs: Any) -> Any:
        cpu = [
            alias(value) if isinstance(value, _Tensor) and not value.is_cpu else convert(value)
            for value in args
        ]
        cpu_kwargs = {name: convert(value) for name, value in kwargs.items()} if kwargs else {}
        if writes:
            _keep_overlaps(args, kwargs, cpu, cpu_kwargs)
        result = call(*cpu, **({"_tpu": kwargs} if outs else {}), **cpu_kwargs)
        if several:
            pairs = zip(result, returned, strict=True)
            return tuple(back(item, where, args, kwargs) for item, where in pairs)
        return back(result, returned[0], args, kwargs) if returned else None

    return kernel


def _keep_overlaps(args: Any, kwargs: Any, cpu: list[Any], cpu_kwargs: dict[str, Any]) -> None:
    """Let aliases of tensors that share memory share a storage: kernels that write look at it."""
    found: list[tuple[torch.Tensor, Any, Any]] = [
        (value, cpu, position) for position, value in enumerate(args) if isinstance(value, _Tensor)
    ]
    found += [(v, cpu_kwargs, name) for name, v in kwargs.items() if isinstance(v, _Tensor)]
    for at, (value, place, key) in enumerate(found):
        for other, other_place, other_key in found[:at]:
            if other is value:
                place[key] = other_place[other_key]
            elif not value.is_cpu and not other.is_cpu and _share_storage(value, other):
                place[key], other_place[other_key] = _views_of_one(value, other)


def _views_of_one(*values: torch.Tensor) -> Iterator[torch.Tensor]:
    """CPU aliases of tensors of one storage, which are views of one as well."""
    first = values[0]
    count = first.untyped_storage().nbytes() // first.element_size()
    whole = bare_cpu(_as_strided(first, [count], [1], 0))
    for value in values:
        if value.dtype is not first.dtype:
            yield to_cpu(value)
            continue
        alias = _as_strided(whole, value.shape, value.stride(), value.storage_offset())
        alias = alias.conj() if value.is_conj() else alias
        yield alias._neg_view() if value.is_neg() else alias


def _writing_outs(call: Kernel, outs: Sequence[str]) -> Kernel:
    """Resize tensors for results as torch does. The memory of an alias cannot grow."""

    def call_with_outs(*cpu: Any, _tpu: dict[str, Any], **kwargs: Any) -> Any:
        given = {name: _tpu[name] for name in outs if isinstance(_tpu.get(name), _Tensor)}
        grown = {name: out for name, out in given.items() if out.numel() == 0 and on_tpu(out)}
        kwargs.update({name: _nothing(out) for name, out in grown.items()})
        try:
            result = call(*cpu, **kwargs)
        except RuntimeError:
            # One may be too small. If not, the second call fails as well, with the same error.
            grown = {name: out for name, out in given.items() if on_tpu(out)}
            kwargs.update({name: _nothing(out) for name, out in grown.items()})
            result = call(*cpu, **kwargs)
        for name, out in given.items():
            new = kwargs[name]
            if name in grown:
                _adopt(out, new)
            elif out.shape != new.shape:
                out.resize_(new.shape)
            if new.is_conj() and not out.is_conj():
                to_cpu(out).copy_(new.resolve_conj())
        return result

    return call_with_outs


def _nothing(like: torch.Tensor) -> Any:
    return _empty([0], dtype=like.dtype)


def _adopt(out: torch.Tensor, new: torch.Tensor) -> None:
    if out.numel() == 0:
        if out.shape != new.shape:
            swap(out, bare_tpu(new))
        return
    if out.shape != new.shape:
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {[*out.shape]}, "
            f"which does not match the required output shape {[*new.shape]}. torch deprecates "
            "this: reuse a tensor for another shape with out.resize_(0)",
            stacklevel=2,
        )
        out.resize_(new.shape)
    to_cpu(out).copy_(new)
