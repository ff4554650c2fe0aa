"""How many collectives a rank took part in, how much it brought and how long that took.

A hint of what a TPU will do: there the calls and the bytes are the same, the times are not.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from tpunb.communication import Collective

_KIND = re.compile(r"([a-z]+)(\d*)\w*\[([\d, ]*)\]")


class Tally:
    """Counts the collectives of one rank."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = {}

    def add(self, operation: str, size: int, waited: float, took: float) -> None:
        """One call: the bytes that this rank brought, and seconds (0.3 µs, measured).

        `waited` until all ranks had come, then `took` to exchange.
        """
        row = self._rows.get(operation)
        if row is None:
            row = self._rows[operation] = [0, 0, 0.0, 0.0]
        row[0] += 1
        row[1] += size
        row[2] += waited
        row[3] += took

    def collectives(self, rank: int) -> list[Collective]:
        """What was counted, the operation with the most bytes first."""
        rows = sorted(self._rows.items(), key=lambda item: (-item[1][1], -item[1][0]))
        return [
            Collective(rank, operation, int(calls), int(size), round(waited, 6), round(took, 6))
            for operation, (calls, size, waited, took) in rows
        ]


@lru_cache(maxsize=512)
def size_of(tensors: Sequence[str]) -> int:
    """Bytes of tensors that are described as 'float32[3, 4]'; of bool one byte each."""
    total = 0
    for described in tensors:
        match = _KIND.match(described)
        if match is not None:
            numbers = [int(number) for number in match[3].split(",") if number.strip()]
            total += math.prod(numbers) * (int(match[2]) // 8 if match[2] else 1)
    return total


mine = Tally()
"""That of this process. A rank is forked from one that takes part in no collectives."""


def save(path: Path, rank: int) -> None:
    """Leave word of this rank's collectives for its run; nothing where there were none."""
    if rows := mine.collectives(rank):
        with contextlib.suppress(OSError):  # a full disk: a hint is not worth a failed run
            path.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def read(path: Path) -> list[Collective]:
    """What `save` wrote; empty if it wrote nothing, or a full disk or a kill cut it off."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [Collective(**row) for row in rows]
