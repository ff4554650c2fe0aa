"""What libraries are told where there is no TPU, so that they train on rehearsal cores.

Lightning's `accelerator="tpu"` takes what `torch_xla._internal.tpu.num_available_devices` counts
on the PCI bus, and nothing else: here it counts the cores of the run. Never called on a TPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from tpunb.worker import xla_patches
from tpunb.worker.replacing import Replacements


def count_cores(cores: int) -> None:
    """For the rest of this process, libraries that count TPU cores find so many."""
    _counting(cores).begin()


@contextlib.contextmanager
def counting_cores(cores: int) -> Iterator[None]:
    """The same within the block; then all is as before."""
    names = _counting(cores)
    names.begin()
    try:
        yield
    finally:
        names.end()


def _counting(cores: int) -> Replacements:
    told = os.environ.get("RANK", "0") != "0"

    def count() -> int:
        nonlocal told
        if not told:
            told = True
            note = f"rehearsal on CPU: libraries that count TPU cores are told of {cores}"
            print(note, flush=True)
        return cores

    def replace(tpu: ModuleType) -> None:
        names.set(tpu, "num_available_devices", count)
        names.at_end(_forget)
        _forget()

    names = Replacements({"torch_xla._internal.tpu": replace})
    return names


def _forget() -> None:
    """Lightning keeps the first answer, which may be that of the prelude."""
    for package in xla_patches.FABRIC:
        if module := sys.modules.get(f"{package}.accelerators.xla"):
            accelerator = module.XLAAccelerator
            accelerator.auto_device_count.cache_clear()
            accelerator.is_available.cache_clear()
