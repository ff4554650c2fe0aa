"""`%%tpu_debug`: a cell on one core in the kernel, and what XLA did with it."""

from tpunb.debug.cell import Wanted, run_cell, switched_spmd_on
from tpunb.debug.kernel import is_persons, kernel_device, taken_in, unwatch, watch
from tpunb.debug.profile import new_folder

__all__ = [
    "Wanted",
    "is_persons",
    "kernel_device",
    "new_folder",
    "run_cell",
    "switched_spmd_on",
    "taken_in",
    "unwatch",
    "watch",
]
