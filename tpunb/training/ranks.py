"""The rank and world size of this process: the same functions in kernel, rank and script."""

from __future__ import annotations

import os
import sys
from typing import Any

from tpunb.backends.xla.runtime import running_module


def rank_and_world() -> tuple[int, int]:
    """Return this core's rank and the world size; 0 and 1 outside a run.

    If the XLA runtime is in use, the rank is the runtime's ordinal, otherwise that of
    torch.distributed's process group, if there is one: results of collectives are in this order,
    and on a pod an ordinal may differ from RANK. The call does not start the runtime, so it
    is allowed in a prelude that each rank runs. Cells above the train cell usually run before the
    ranks exist, so helpers call this when a loop begins, not when they are created.
    """
    if "RANK" not in os.environ:
        return 0, 1
    if running_module() is None:
        dist: Any = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return launched_rank_and_world()
    import torch_xla.runtime as xr

    return xr.global_ordinal(), xr.world_size()


def launched_rank_and_world() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE as the launcher has set them; 0 and 1 outside a run."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """True for rank 0, whose values `--returns` hands to the kernel, and outside a run."""
    return os.environ.get("RANK", "0") == "0"
