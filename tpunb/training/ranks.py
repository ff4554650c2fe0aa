"""Which rank this process is, and of how many: the same question in kernel, rank and script."""

from __future__ import annotations

import os

from tpunb.xla.runtime import running_module


def rank_and_world() -> tuple[int, int]:
    """This core's number, and how many cores work together; 0 and 1 outside a run.

    If the XLA runtime is in use, its own number: results of collectives are in this order, and
    on a pod it need not be RANK. Asking does not start the runtime; it may be asked in a prelude
    that each rank runs. Cells above the train cell mostly run in no rank yet, so helpers ask
    when a loop begins, not when they are made.
    """
    if "RANK" not in os.environ:
        return 0, 1
    if running_module() is None:
        return launched_rank_and_world()
    import torch_xla.runtime as xr

    return xr.global_ordinal(), xr.world_size()


def launched_rank_and_world() -> tuple[int, int]:
    """RANK and WORLD_SIZE as the launcher has set them; 0 and 1 outside a run."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the process whose values `--returns` brings back."""
    return os.environ.get("RANK", "0") == "0"
