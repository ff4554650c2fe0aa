"""`torch.tpu`, rehearsed: the public names of torch_tpu 0.2.0.

What has no meaning without a TPU (Pallas, its own operations and optimizers) is there to be
imported and raises when it is called.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tpunb.backends.rehearsal.errors import make_refusal
from tpunb.backends.torchtpu.rehearsal import seeds

_F = TypeVar("_F", bound=Callable[..., Any])
_DEVICE = "tpu"
_FRAMEWORK = ("torch", "torch_tpu", "tpunb")
"""Packages whose modules may call the functions that torch.accelerator has as well."""
_ALLOW = "TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS"

_NOT_REHEARSED = {
    "ops": """align_jagged_to_multiple all_gather_dim max_pool1d max_pool1d_backward max_pool2d
    max_pool2d_backward max_pool3d max_pool3d_backward optimization_barrier ragged_all_to_all
    ragged_dot ragged_dot_weight_grad recv reduce_scatter_dim send sparse_dense_matmul
    sparse_dense_matmul_activation_unstack sparse_dense_matmul_grad_with_adagrad
    sparse_dense_matmul_grad_with_adam sparse_dense_matmul_grad_with_sgd
    sparse_dense_matmul_gradient_stack sparse_gather sparse_gather_backward sparse_iota
    sparse_map_row splash_sdpa strip_jagged_padding""",
    "optimizers": "AdamW Muon Optimizer Sgd SingleTraceTrainer",
    "pallas": "get_pallas_mesh jax_op",
    "profiler": "TpuProfilerConfig",
}
"""By submodule of torch.tpu: names that need a TPU."""


def _internal(prefer: str, since: tuple[int, int] = (2, 11)) -> Callable[[_F], _F]:
    """Refuse a caller outside of torch, as torch_tpu 0.2.0 does: torch.accelerator has the name."""

    def decorate(function: _F) -> _F:
        name = "device" if function.__name__ == "__init__" else function.__name__

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            if caller not in _FRAMEWORK and torch_version() >= since:
                _refuse(f"torch.tpu.{name}", prefer)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorate


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _refuse(name: str, prefer: str) -> None:
    text = f"{name} is for torch's own use. Use torch.accelerator.{prefer} instead"
    if os.environ.get(_ALLOW) != "1":
        raise RuntimeError(f"{text}, or set {_ALLOW}=1 while you change the code")
    warnings.warn(text, stacklevel=3)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    found = torch.device(_DEVICE if device is None else device)
    if found.type != _DEVICE:
        raise ValueError(f"Expected a device of type 'tpu', but got {str(found)!r}")
    return found.index or 0


def check_index(index: int) -> None:
    """Refuse another core than this process's."""
    if index > 0:
        raise ValueError(
            f"Cannot set TPU device to index {index}: this process has one TPU core, which is "
            'tpu:0 in each process. Leave the call out, and use torch.device("tpu")'
        )


class EagerMode(enum.Enum):
    DEFER_AND_FUSE = 0
    DEFER_NEVER = 1
    DEFER_NEVER_AND_LAUNCH_BLOCKING = 2


class Precision(enum.Enum):
    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


class TpuStream(torch.Stream):
    """A stream: all work of a rehearsal is done when a call returns."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> TpuStream:
        made: Any = super().__new__(cls, device=torch.device(_DEVICE, _index(device)))
        return made  # type: ignore[no-any-return]

    def record_event(self, event: Any = None) -> Any:
        event = TpuEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class TpuEvent(torch.Event):
    """An event: the moment of its last record."""

    def __new__(cls, enable_timing: bool = False, *args: Any, **kwargs: Any) -> TpuEvent:
        made: Any = super().__new__(cls, device=torch.device(_DEVICE, 0))
        made._at = None
        return made  # type: ignore[no-any-return]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> Any:
        self._at: float | None = time.perf_counter()
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        if self._at is None or end_event._at is None:
            raise RuntimeError("Both events must be recorded before elapsed_time()")
        milliseconds: float = (end_event._at - self._at) * 1000
        return milliseconds


class _Context:
    """`with torch.tpu.device(0)`: there is one device."""

    @_internal("device_index")
    def __init__(self, device: Any = None) -> None:
        torch.tpu.set_device(0 if isinstance(device, int) and device < 0 else device)  # type: ignore[attr-defined]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class _ContextOf(_Context):
    def __init__(self, obj: Any) -> None:
        super().__init__(-1)


@dataclass(frozen=True)
class TpuDeviceProperties:
    name: str
    total_memory: int
    multi_processor_count: int = 1


class TpuModule(types.ModuleType):
    """`torch.tpu`."""

    EagerMode = EagerMode
    Event = TpuEvent
    Precision = Precision
    Stream = TpuStream
    device = _Context
    device_of = _ContextOf
    allow_excess_precision = False
    eager_mode = EagerMode.DEFER_NEVER

    def __init__(self) -> None:
        super().__init__("torch.tpu", "torch.tpu, rehearsed on the CPU")
        self.__path__: list[str] = []

    @property
    def default_generators(self) -> tuple[torch.Generator]:
        return (seeds.default_generator(),)

    @_internal("is_available")
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    @_internal("device_count")
    def device_count(self) -> int:
        return 1

    @_internal("current_device_index")
    def current_device(self) -> int:
        return 0

    @_internal("set_device_index")
    def set_device(self, device: Any) -> None:
        check_index(_index(device))

    @_internal("synchronize")
    def synchronize(self, device: Any = None) -> None:
        pass

    @_internal("current_stream")
    def current_stream(self, device: Any = None) -> TpuStream:
        return TpuStream()

    def default_stream(self, device: Any = None) -> TpuStream:
        return TpuStream()

    @_internal("set_stream")
    def set_stream(self, stream: Any) -> None:
        pass

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def manual_seed(self, seed: int) -> None:
        seeds.default_generator().manual_seed(int(seed))

    manual_seed_all = manual_seed

    @_internal("random.initial_seed", since=(2, 13))
    def initial_seed(self) -> int:
        return seeds.default_generator().initial_seed()

    @_internal("random.get_rng_state", since=(2, 13))
    def get_rng_state(self, device: Any = _DEVICE) -> torch.Tensor:
        self._check_current(device)
        return seeds.default_generator().get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = _DEVICE) -> None:
        self._check_current(device)
        seeds.default_generator().set_state(new_state.cpu())

    @staticmethod
    def _check_current(device: Any) -> None:
        if _index(device):
            raise ValueError(
                f"There is no device {str(device)!r}: each process has one TPU core, tpu:0"
            )

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    def get_device_name(self, device: Any = None) -> str:
        return "TPU (rehearsed on the CPU)"

    def get_device_properties(self, device: Any = None) -> TpuDeviceProperties:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return TpuDeviceProperties(self.get_device_name(), total)

    @contextlib.contextmanager
    def precision(self, mode: Any) -> Iterator[None]:
        if not isinstance(mode, Precision):
            raise ValueError(f"expected a torch.tpu.Precision, got {mode!r}")
        yield

    @contextlib.contextmanager
    def set_eager_mode(self, mode: Any) -> Iterator[None]:
        yield

    def topology_aware_mesh(self, mesh_shape: tuple[int, ...], **kwargs: Any) -> torch.Tensor:
        return topology_aware_mesh(mesh_shape, **kwargs)

    # Private, but torch calls them.
    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        pass

    def _get_generator(self, device: Any) -> torch.Generator:
        return seeds.default_generator()

    def _exchange_device(self, device: int) -> int:
        return 0

    _maybe_exchange_device = _exchange_device


def set_tpu_launch_env(*, nnodes: int | None = None, nproc_per_node: int | None = None) -> None:
    """On a TPU, sets variables for the processes of a run; a rehearsal needs none."""


def spmd_safe(func: _F) -> _F:
    """On a TPU, fuses collectives with other operations; a rehearsal runs each by itself."""
    return func


def topology_aware_mesh(
    mesh_shape: tuple[int, ...],
    *,
    dcn_mesh_shape: tuple[int, ...] | None = None,
    allow_split_physical_axes: bool = False,
    contiguous_submeshes: bool = False,
) -> torch.Tensor:
    """The ranks in order: rehearsal cores have no places in a network."""
    ranks = torch.arange(torch.distributed.get_world_size(), device="cpu")
    return ranks.reshape(mesh_shape)


@contextlib.contextmanager
def custom_compiler_options(options: dict[str, str]) -> Iterator[None]:
    """On a TPU, options of XLA."""
    yield


def add_submodules(module: TpuModule) -> None:
    """`torch.tpu.distributed` and the others, in sys.modules too."""
    names: dict[str, dict[str, Any]] = {
        part: {name: make_refusal(f"torch.tpu.{part}.{name}") for name in joined.split()}
        for part, joined in _NOT_REHEARSED.items()
    }
    names["compiler"] = {"custom_compiler_options": custom_compiler_options}
    names["distributed"] = {
        "set_tpu_launch_env": set_tpu_launch_env,
        "spmd_safe": spmd_safe,
        "topology_aware_mesh": topology_aware_mesh,
    }
    for part, contents in names.items():
        made = types.ModuleType(f"torch.tpu.{part}")
        vars(made).update(contents)
        setattr(module, part, made)
        sys.modules[made.__name__] = made
