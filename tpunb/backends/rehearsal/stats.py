"""Counts the collectives of a rank, their bytes and their times.

On a TPU the calls and the bytes are the same, the times are not.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from tpunb.backends.rehearsal.call import RankCall
from tpunb.runs.result import Collective
from tpunb.utils import records

_KIND = re.compile(r"([a-z]+)(\d*)\w*\[([\d, ]*)\]")


class CollectiveStats:
    """The collectives of one rank, summed by operation."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {}
        self.watchers: list[Callable[[RankCall, int], None]] = []
        """Called at each collective with its call and bytes."""

    def add(self, operation: str, size: int, waited: float, took: float) -> None:
        """Add one call (0.3 µs, measured): bytes that this rank sent, and seconds.

        `waited`: until all ranks took part; `took`: for the exchange after that.
        """
        row = self._rows.get(operation)
        if row is None:
            row = self._rows[operation] = [0, 0, 0.0, 0.0]
        row[0] += 1
        row[1] += size
        row[2] += waited
        row[3] += took

    def seconds(self) -> float:
        """Seconds in all collectives: waiting for the other ranks, and exchanging."""
        return sum(waited + took for _, _, waited, took in self._rows.values())

    def collectives(self, rank: int) -> list[Collective]:
        """The sums, the operation with the most bytes first."""
        rows = sorted(self._rows.items(), key=lambda item: (-item[1][1], -item[1][0]))
        return [
            Collective(rank, operation, int(calls), int(size), round(waited, 6), round(took, 6))
            for operation, (calls, size, waited, took) in rows
        ]


@lru_cache(maxsize=512)
def size_of(tensors: Sequence[str]) -> int:
    """Bytes of tensors described as 'float32[3, 4]'; a bool is one byte."""
    total = 0
    for described in tensors:
        match = _KIND.match(described)
        if match is not None:
            numbers = [int(number) for number in match[3].split(",") if number.strip()]
            total += math.prod(numbers) * (int(match[2]) // 8 if match[2] else 1)
    return total


collective_stats = CollectiveStats()
"""The statistics of this process. A rank's parent process takes part in no collectives."""


def save_collectives(path: Path, rank: int) -> None:
    """Write this rank's collectives to its run folder, if there were any."""
    if rows := collective_stats.collectives(rank):
        with contextlib.suppress(OSError):  # a full disk: statistics are not worth a failed run
            path.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def read_collectives(path: Path) -> list[Collective]:
    """The rows that `save_collectives` wrote; [] if there are none, or if the file is damaged."""
    try:
        return list(records.convert(tuple[Collective, ...], records.read(path)))
    except (OSError, ValueError):
        return []
