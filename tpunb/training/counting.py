"""What XLA has compiled, as a number to look at before and after."""

from __future__ import annotations

import sys


def compilations() -> int:
    """How many programs XLA has compiled in this process; 0 without torch_xla.

    Of the metrics that torch_xla itself counts, which `torch_xla.debug.metrics.clear_all()` sets
    back. One that is being compiled in the background counts when it is done.
    """
    metrics = sys.modules.get("torch_xla.debug.metrics")
    timed = metrics.metric_data("CompileTime") if metrics is not None else None
    return int(timed[0]) if timed else 0
