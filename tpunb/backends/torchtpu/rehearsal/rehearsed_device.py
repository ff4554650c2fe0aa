"""`torch.device("tpu")` without a TPU: tensors of a device of their own, over the CPU's memory.

x.device.type is "tpu"; operations that mix devices raise; x.numpy() raises. Autograd, views and
version counters are torch's own.
"""

from __future__ import annotations

from typing import Any

import torch

from tpunb.backends.torchtpu import loading
from tpunb.backends.torchtpu.rehearsal.aliases import check_layout, on_tpu, to_cpu, to_tpu
from tpunb.utils.errors import SetupError
from tpunb.utils.install_commands import INSTALL_TORCH

__all__ = ["install", "is_installed", "on_tpu", "to_cpu", "to_tpu"]

OLDEST = (2, 11)
_kept: list[Any] = []
"""Registrations end with the objects that made them."""


def is_installed() -> bool:
    """Whether this process has the device."""
    return bool(_kept)


def install() -> None:
    """Give this process `torch.device("tpu")`; does nothing if it has it already.

    Raises SetupError if torch is too old, or if torch_tpu is loaded.
    """
    if is_installed():
        return
    _check()
    from tpunb.backends.torchtpu.rehearsal import (
        autocast,
        device_guard,
        kernels,
        module,
        patches,
    )

    made = module.TpuModule()
    registration: Any = torch.utils.backend_registration
    registration._setup_privateuseone_for_python_backend(
        "tpu", backend_module=made, hook=_hooks(), device_guard=device_guard.make_device_guard()
    )
    device_guard.raise_in_backward()
    module.add_submodules(made)
    loading.put_stand_in()
    _kept.extend([made, kernels.register(), autocast.register()])
    patches.apply()
    device_guard.defer_interrupts()
    # Like the CPU's, the backward pass runs in the thread that asks for it. A thread of the device
    # would have OpenMP threads of its own, and both pools spin while they wait: where ranks x
    # threads are all processors, a step took three times as long.
    torch.autograd.set_multithreading_enabled(False)


def _check() -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise SetupError(
            f"rehearsing TorchTPU needs torch 2.11 or later, and this is {torch.__version__}: "
            f"{INSTALL_TORCH}"
        )
    if hasattr(torch, "tpu") or loading.is_loaded():
        raise SetupError(
            "torch_tpu is loaded in this process, so no TPU can be rehearsed in it: set "
            f"{loading.AUTOLOAD}=0 before torch is imported"
        )
    if not check_layout():
        raise SetupError(
            f"torch {torch.__version__} on this Python lays out memory in a way that rehearsing "
            "TorchTPU does not know: use CPython 3.10 to 3.13 and torch 2.11 to 2.15"
        )


def _hooks() -> Any:
    core: Any = torch._C
    accelerator = core._acc

    class Hooks(accelerator.PrivateUse1Hooks):  # type: ignore[misc, name-defined]
        def is_available(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    return Hooks()
