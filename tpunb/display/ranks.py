"""Ranks as people name them, and lines that several ranks wrote alike, as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence


def name_ranks(ranks: Iterable[int]) -> str:
    """'2', '0,2', '0-3', '0-2,5'."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def parse_ranks(text: str, world_size: int) -> frozenset[int]:
    """The ranks that `all`, `none` or a list such as `0,3-5` names.

    Raises ValueError, which says what is allowed.
    """
    allowed = f"use all, none, or ranks from 0 to {world_size - 1} such as 0 or 0,2-3"
    words = text.strip().lower()
    if words == "all":
        return frozenset(range(world_size))
    if words == "none":
        return frozenset()
    found: set[int] = set()
    for part in words.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} does not name ranks: {allowed}")
        span = range(int(first), int(last if dash else first) + 1)
        if not span:
            raise ValueError(f"{part.strip()!r} counts downwards: {allowed}")
        if span[-1] >= world_size:
            raise ValueError(f"there is no rank {span[-1]}: {allowed}")
        found.update(span)
    return frozenset(found)


def fold(written: Mapping[int, Sequence[str]]) -> list[tuple[str, list[int]]]:
    """The lines of all ranks in one order, each with the ranks that wrote it.

    The order within every rank is kept; each of its lines appears once.
    """
    merged: list[tuple[str, list[int]]] = []
    known: set[str] = set()
    for rank in sorted(written):
        lines = written[rank]
        if known.isdisjoint(lines):  # as where ranks tell their numbers: quick, for many ranks
            merged += _alone(lines, rank)
        else:
            merged = _merge(merged, lines, rank)
        known.update(lines)
    return merged


def _alone(lines: Sequence[str], rank: int) -> list[tuple[str, list[int]]]:
    return [(line, [rank]) for line in lines]


def _merge(
    merged: list[tuple[str, list[int]]], lines: Sequence[str], rank: int
) -> list[tuple[str, list[int]]]:
    """Add the lines of one more rank: to equal lines where it can, before the next such else."""
    places: dict[str, list[int]] = {line: [] for line in lines}
    for place, (line, _) in enumerate(merged):
        if line in places:
            places[line].append(place)
    found: list[tuple[str, list[int]]] = []
    done, waiting = 0, 0
    for index, line in enumerate(lines):
        known = places[line]
        if (at := bisect_right(known, done - 1)) == len(known):
            continue
        found += merged[done : known[at]]
        found += _alone(lines[waiting:index], rank)
        found.append((line, [*merged[known[at]][1], rank]))
        done, waiting = known[at] + 1, index + 1
    found += merged[done:]
    found += _alone(lines[waiting:], rank)
    return found
