"""Makes a rehearsal answer like a TPU to libraries and torch_xla itself. Never used on a TPU.

- Lightning's `accelerator="tpu"` uses as many cores as `torch_xla._internal.tpu` counts on the PCI
  bus (`num_available_devices`): in a rehearsal, the cores of the run.
- `torch_xla.amp.autocast` fails on any device but a TPU, for lack of an attribute. With the
  attribute it works on the CPU, too.
- `xr.get_master_ip()` raises: on a TPU of one host it is "localhost". And CheckpointManager starts
  a service for a TPU VM's notices of preemption, which a rehearsal does not get.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tpunb.backends.xla import private_names
from tpunb.utils.patching import Replacements


def answer_as_tpu(cores: int) -> None:
    """Answer like a TPU with `cores` cores, for the rest of this process."""
    _answers(cores).begin()


@contextlib.contextmanager
def answering_as_tpu(cores: int) -> Iterator[None]:
    """Answer like a TPU with `cores` cores within a block."""
    names = _answers(cores)
    names.begin()
    try:
        yield
    finally:
        names.end()


def _answers(cores: int) -> Replacements:
    printed = os.environ.get("RANK", "0") != "0"

    def count() -> int:
        nonlocal printed
        if not printed:
            printed = True
            note = f"rehearsal on CPU: libraries that count TPU cores see {cores}"
            print(note, flush=True)
        return cores

    def replace_count(tpu: ModuleType) -> None:
        names.set(tpu, "num_available_devices", count)
        names.at_end(_clear_caches)
        _clear_caches()

    def replace_hardware(autocast_mode: ModuleType) -> None:
        names.set(autocast_mode, "xm", _OfTpu(autocast_mode.xm))

    def replace_address(runtime: ModuleType) -> None:
        names.set(runtime, "get_master_ip", lambda: "localhost")

    def replace_notices(manager: ModuleType) -> None:
        xlac: Any = manager.torch_xla._XLAC
        names.set(xlac, "_ensure_xla_coordinator_initialized", lambda *args: None)
        names.set(xlac, "_activate_preemption_sync_manager", lambda: None)
        names.set(xlac, "_sync_point_reached", lambda step: False)

    names = Replacements(
        {
            "torch_xla._internal.tpu": replace_count,
            "torch_xla.amp.autocast_mode": replace_hardware,
            "torch_xla.runtime": replace_address,
            "torch_xla.experimental.distributed_checkpoint.manager": replace_notices,
        }
    )
    return names


class _OfTpu:
    """`torch_xla.core.xla_model`, with a TPU as its device."""

    def __init__(self, xla_model: ModuleType) -> None:
        self._xla_model = xla_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xla_model, name)

    def xla_device_hw(self, device: object) -> str:
        return "TPU"


def _clear_caches() -> None:
    """Lightning caches the first answer, which may be the prelude's."""
    for package in private_names.FABRIC:
        if module := sys.modules.get(f"{package}.accelerators.xla"):
            accelerator = module.XLAAccelerator
            accelerator.auto_device_count.cache_clear()
            accelerator.is_available.cache_clear()
