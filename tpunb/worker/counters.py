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


def made() -> int:
    """Tensors that operations have made; a step that does the same makes as many."""
    import torch_xla.debug.metrics as met

    return met.counter_value("CreateXlaTensor") or 0


def left() -> dict[str, int]:
    """How often something has left the device that slows a loop, in words for the person.

    Numbers that were read count as an operator that XLA does not have.
    """
    import torch_xla.debug.metrics as met

    found = {}
    for name in met.executed_fallback_ops():
        if name == "aten::_local_scalar_dense":
            what = (
                "a number is read from the device at every step (.item(), print, a condition), and "
                "the loop waits for it; %%tpu_debug names the line"
            )
        else:
            what = f"{name.removeprefix('aten::')} runs on the CPU at every step: XLA has none"
        found[what] = met.counter_value(name) or 0
    return found


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
