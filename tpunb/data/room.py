"""Whether it fits, and how much it is in words."""

from __future__ import annotations

import shutil
from pathlib import Path

from tpunb.errors import DataError


def size(count: int) -> str:
    """'512 B', '1.5 kB', '20 MB': as file managers count, by thousands."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    digits = 1 if unit != "B" and amount < 9.95 else 0
    return f"{amount:.{digits}f} {unit}"


def need(folder: Path, count: int, what: str) -> None:
    """Raise DataError unless `count` more bytes fit where `folder` is, or will be."""
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if count > free:
        raise DataError(
            f"{what} needs {size(count)}, and {there} has {size(free)} free: remove something "
            "there, or choose a larger disk with --to"
        )
