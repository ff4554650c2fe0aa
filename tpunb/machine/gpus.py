"""CUDA devices, counted by their device files: CUDA is not started, and torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def count_gpus(env: Mapping[str, str], root: Path) -> int:
    """Number of GPUs that a process with this environment may use.

    As CUDA does it, the first entry of CUDA_VISIBLE_DEVICES that names no device ends the list.
    """
    names = (path.name.removeprefix("nvidia") for path in root.glob("dev/nvidia[0-9]*"))
    present = sum(name.isdecimal() for name in names)
    if VISIBLE not in env:
        return present
    count = 0
    for entry in map(str.strip, env[VISIBLE].split(",")):
        index = entry.isdecimal() and int(entry) < present
        if not index and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return min(count, present)


def has_cuda() -> bool:
    """False if the installed torch was built for the CPU only ('2.13.0+cpu'), or is missing."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
