"""What a rehearsal's collectives amounted to: data, and the same in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One collective operation in one rank, all its calls together."""

    rank: int
    operation: str
    """'all_reduce sum', 'all_gather', 'rendezvous', …"""
    calls: int
    bytes: int
    """What this rank brought. A TPU's cores bring as much."""
    waited: float
    """Seconds until all ranks that take part had come."""
    took: float
    """Seconds from then on."""


def in_short(rows: Sequence[Collective]) -> str:
    """'120 collectives, 4.7 GB': of the rank with the most of each."""
    calls = _most(rows, "calls")
    return f"{calls:,.0f} collective{'s' if calls != 1 else ''}, {_size(_most(rows, 'bytes'))}"


def in_words(rows: Sequence[Collective]) -> str:
    """A sentence about one rank, and what of it holds for a TPU."""
    per_operation: dict[str, int] = {}
    for row in rows:
        per_operation[row.operation] = max(row.calls, per_operation.get(row.operation, 0))
    operations = ", ".join(f"{calls:,} {name}" for name, calls in per_operation.items())
    return (
        f"each rank: {in_short(rows)} ({operations}), {_most(rows, 'took'):.1f} s; waited up to "
        f"{_most(rows, 'waited'):.1f} s for other ranks. Rehearsal on CPU: a TPU has the same "
        "calls and bytes, and other times"
    )


def _most(rows: Sequence[Collective], name: str) -> float:
    """The largest sum of one rank."""
    sums: dict[int, float] = {}
    for row in rows:
        sums[row.rank] = sums.get(row.rank, 0) + getattr(row, name)
    return max(sums.values(), default=0)


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
