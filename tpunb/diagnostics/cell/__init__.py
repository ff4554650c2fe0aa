"""`%%tpu_debug`: a cell on one core in the kernel, and what XLA did with it."""

from tpunb.diagnostics.cell.run import (
    DebugOptions,
    new_profile_folder,
    run_cell,
    switched_spmd_on,
)

__all__ = ["DebugOptions", "new_profile_folder", "run_cell", "switched_spmd_on"]
