"""What a device must give torch and torch.library cannot register: replaced in Python.

Storages ask C++ for an allocator, torch.Generator for a generator, torch.accelerator for memory,
DistributedDataParallel for pinned memory. torch.compile chooses its backend as torch_tpu does.
"""

from __future__ import annotations

import functools
import os
import resource
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from tpunb.backends.torchtpu.rehearsal import seeds
from tpunb.backends.torchtpu.rehearsal.kernels import PINNED
from tpunb.backends.torchtpu.rehearsal.module import check_index

_C: Any = torch._C
_torch: Any = torch
_kept: list[Any] = []


def apply() -> None:
    """Replace all, once."""
    _patch_storages()
    _patch_generators()
    _patch_memory()
    _patch_sharing()
    _patch_data_parallel()
    _patch_compile()


def _is_tpu(device: Any) -> bool:
    return torch.device(device).type == "tpu"


def _new_storage(size: int) -> Any:
    return torch.empty(size, dtype=torch.uint8, device="tpu").untyped_storage()


def _patch_storages() -> None:
    storage: Any = torch.UntypedStorage
    resize, to, clone, make = storage.resize_, storage.to, storage.clone, storage.__new__

    @functools.wraps(resize)
    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "tpu":
            return resize(self, size)
        if size > self.nbytes():
            raise RuntimeError(
                "The storage of a rehearsed TPU tensor cannot grow: resize the tensor, or make a "
                "new one"
            )
        return self  # FSDP frees a storage and allocates it again: the memory stays

    @functools.wraps(to)
    def storage_to(self: Any, *, device: Any, non_blocking: bool = False) -> Any:
        if _is_tpu(device) and self.device.type != "tpu":
            return _new_storage(self.nbytes()).copy_(self)
        return to(self, device=device, non_blocking=non_blocking)

    @functools.wraps(clone)
    def storage_clone(self: Any) -> Any:
        if self.device.type != "tpu":
            return clone(self)
        return _new_storage(self.nbytes()).copy_(self)

    @functools.wraps(make)
    def storage_new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or not _is_tpu(device):
            return make(cls, *args, **kwargs)
        if args and not isinstance(args[0], int):
            return make(cls, *args).to(device="tpu")
        return _new_storage(args[0] if args else kwargs.get("size", 0))

    storage.resize_, storage.to, storage.clone = resize_, storage_to, storage_clone
    storage.__new__ = staticmethod(storage_new)


def _patch_generators() -> None:
    cpu = _C.Generator

    class AnyGenerator(type(cpu)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, cpu)

    class Generator(cpu, metaclass=AnyGenerator):  # type: ignore[misc, valid-type]
        """`torch.Generator`, also of the device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return seeds.TpuGenerator() if _is_tpu(device) else cpu(device)

    Generator.__module__ = "torch"
    _torch.Generator = Generator


def _patch_memory() -> None:
    """The memory of this process; the system's. torch's own calls end in an allocator in C++."""
    page = os.sysconf("SC_PAGE_SIZE")

    def stats(index: int) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with open("/proc/self/statm") as file:
            current = int(file.read().split()[1]) * page
        counts = {"current": current, "peak": max(peak, current), "allocated": 0, "freed": 0}
        return {"allocated_bytes": {"all": counts}, "reserved_bytes": {"all": counts}}

    def info(index: int) -> tuple[int, int]:
        return tuple(page * os.sysconf(f"SC_{name}PHYS_PAGES") for name in ("AV", ""))  # type: ignore[return-value]

    def exchange(index: int) -> int:
        check_index(index)
        return 0

    replaced: dict[str, Callable[..., Any]] = {
        "setDeviceIndex": check_index,
        "exchangeDevice": exchange,
        "synchronizeDevice": lambda index: None,
        "emptyCache": lambda: None,
        "emptyHostCache": lambda: None,
        "isAllocatorInitialized": lambda: True,
        "getDeviceStats": stats,
        "getMemoryInfo": info,
        "resetPeakStats": lambda index: None,
        "resetAccumulatedStats": lambda index: None,
        "getDeviceCapability": lambda index: {},
    }
    for name, function in replaced.items():
        if hasattr(_C, f"_accelerator_{name}"):
            setattr(_C, f"_accelerator_{name}", function)


def _patch_sharing() -> None:
    """torch shares memory with other processes by its file, and the device's memory has none."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        reduce = ForkingPickler._extra_reducers[kind]  # type: ignore[attr-defined]
        ForkingPickler.register(kind, functools.partial(_reduce, reduce))


def _reduce(reduce: Callable[[Any], Any], value: Any) -> Any:
    """Raises where the tensor arrives: a queue sends in a thread, whose errors are lost."""
    return (_refuse_shared, ()) if value.device.type == "tpu" else reduce(value)


def _refuse_shared() -> None:
    raise RuntimeError(
        "A tensor on the TPU cannot be sent to another process, or come from a DataLoader's "
        'worker. Send a tensor of the CPU, and use .to("tpu") where it arrives'
    )


def _patch_data_parallel() -> None:
    data_parallel: Any = torch.nn.parallel.DistributedDataParallel
    init = data_parallel.__init__

    @functools.wraps(init)
    def initialise(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("find_unused_parameters") or kwargs.get("static_graph"):
            _allow_pinned()
        init(self, module, *args, **kwargs)

    data_parallel.__init__ = initialise


def _allow_pinned() -> None:
    """Give C++ plain memory where it asks the CPU for pinned memory.

    From here on torch.empty_strided on the CPU takes 25 us instead of 3: not before it is needed.
    """
    if _kept:
        return

    def empty_strided(
        size: list[int],
        stride: list[int],
        *,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
    ) -> Any:
        dtype = dtype or torch.get_default_dtype()
        pairs = zip(size, stride, strict=True)
        count = 0 if 0 in size else 1 + sum((length - 1) * step for length, step in pairs)
        storage = torch.UntypedStorage(count * dtype.itemsize, device="cpu")
        if pin_memory:
            setattr(storage, PINNED, True)
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, size, stride)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this replaces a kernel
        library.impl("empty_strided", empty_strided, "CPU")
    _kept.append(library)


def _patch_compile() -> None:
    """As torch_tpu 0.2.0: without `backend`, by the inputs, and with static shapes."""
    compiled = torch.compile

    @functools.wraps(compiled)
    def compile_for_tpu(*args: Any, **kwargs: Any) -> Any:
        from tpunb.backends.torchtpu.rehearsal import compiling

        compiling.set_up()
        if kwargs.get("backend") is None:
            kwargs["backend"] = compiling.choose_backend
        if "dynamic" not in kwargs and kwargs["backend"] in ("tpu", compiling.choose_backend):
            kwargs["dynamic"] = False
        return compiled(*args, **kwargs)

    _torch.compile = compile_for_tpu
