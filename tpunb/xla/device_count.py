"""Lets libraries that count TPU cores train on rehearsal cores.

Lightning's `accelerator="tpu"` takes as many cores as `torch_xla._internal.tpu` counts on the PCI
bus (`num_available_devices`). In a rehearsal that function returns the cores of the run. Never
called on a TPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType

from tpunb.xla import private_names
from tpunb.xla.patching import Replacements


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
    printed = os.environ.get("RANK", "0") != "0"

    def count() -> int:
        nonlocal printed
        if not printed:
            printed = True
            note = f"rehearsal on CPU: libraries that count TPU cores see {cores}"
            print(note, flush=True)
        return cores

    def replace(tpu: ModuleType) -> None:
        names.set(tpu, "num_available_devices", count)
        names.at_end(_clear_caches)
        _clear_caches()

    names = Replacements({"torch_xla._internal.tpu": replace})
    return names


def _clear_caches() -> None:
    """Lightning caches the first answer, which may be the prelude's."""
    for package in private_names.FABRIC:
        if module := sys.modules.get(f"{package}.accelerators.xla"):
            accelerator = module.XLAAccelerator
            accelerator.auto_device_count.cache_clear()
            accelerator.is_available.cache_clear()
