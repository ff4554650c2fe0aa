"""What torch_xla itself counts, as a rank's pulse wants it."""

from __future__ import annotations


def compiled() -> int:
    """Compilations begun (a third of a µs)."""
    import torch_xla.debug.metrics as met

    return met.counter_value("UncachedCompile") or 0


def compile_seconds() -> float:
    """Seconds of those that have ended."""
    import torch_xla.debug.metrics as met

    timed = met.metric_data("CompileTime")
    return float(timed[1]) / 1e9 if timed else 0.0


def look() -> tuple[int, int, int, int]:
    """Steps (MarkStep), compilations begun (UncachedCompile), ended, and their nanoseconds.

    torch_xla counts a compilation when it begins and times it when it ends (measured on 2.9:
    28 s of one show 1 and 0). The user may set all of them back to 0.
    """
    import torch_xla.debug.metrics as met

    timed = met.metric_data("CompileTime")
    return (
        met.counter_value("MarkStep") or 0,
        met.counter_value("UncachedCompile") or 0,
        timed[0] if timed else 0,
        int(timed[1]) if timed else 0,
    )
