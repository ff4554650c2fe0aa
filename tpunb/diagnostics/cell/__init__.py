"""`%%tpu_debug`: runs a cell on one core in the kernel, and reports on it."""

from tpunb.diagnostics.cell.run import (
    DebugSettings,
    new_profile_folder,
    run_cell,
    switched_spmd_on,
)

__all__ = ["DebugSettings", "new_profile_folder", "run_cell", "switched_spmd_on"]
