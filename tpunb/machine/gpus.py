"""CUDA devices, counted by their device files: CUDA is not started, and torch is not imported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


def has_cuda(path: Sequence[str]) -> bool:
    """False if the torch in one of these folders was built without CUDA.

    Its `version.py` names CUDA's release, or has `cuda = None` (torch 2.9 to 2.15).
    """
    for folder in path:
        try:
            text = (Path(folder) / "torch/version.py").read_text(encoding="utf-8")
        except OSError:
            continue
        return re.search(r"^cuda\b.*=\s*None\s*$", text, re.MULTILINE) is None
    return True
