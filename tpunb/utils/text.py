"""Format sizes, durations and ranks as text; merge equal lines of several ranks."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence

MOST_HOSTS = 4
"""The most hosts that are named with their ranks."""


def size(count: int) -> str:
    """Format bytes in powers of 1000, as file managers do: '512 B', '1.5 kB', '20 MB'."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:
            break
        amount, unit = amount / 1000, larger
    digits = 1 if unit != "B" and amount < 9.95 else 0
    return f"{amount:.{digits}f} {unit}"


def memory_size(count: float) -> str:
    """Format bytes in powers of 1024, as for memory and TPU chips: '512 MiB', '7.5 GiB'."""
    gib = count / 2**30
    if gib < 1:
        return f"{count / 2**20:.0f} MiB"
    return f"{gib:.{1 if gib < 100 else 0}f} GiB"


def number(value: float) -> str:
    """Format a metric's value: '0.4123', '12', '23456.8'."""
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return f"{value:.6g}" if abs(value) >= 1e4 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format a duration: '0 s', '59 s', '1 min 05 s', '2 h 03 min'."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def excerpt(line: str, most: int, *, around: int = 0) -> str:
    """Cut a line to at most `most` characters, including those at `around`; `…` marks a cut."""
    if len(line) <= most:
        return line
    start = max(0, min(around - most // 4, len(line) - most))
    kept = line[start : start + most]
    kept = f"…{kept[1:]}" if start else kept
    return f"{kept[:-1]}…" if start + most < len(line) else kept


def date_and_time(seconds: float) -> str:
    """Format seconds since the epoch as local time; '?' for a time outside of the calendar."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return "?"


def name_ranks(ranks: Iterable[int], hosts: Sequence[str] = (), world_size: int = 0) -> str:
    """Format ranks: '0-2,5', on several hosts 'h0/0-3,h1/4', on many hosts the ranks only.

    `hosts`: the names of the hosts, in order, over which `world_size` ranks are spread evenly.
    """
    if hosts:
        local = max(1, world_size // len(hosts))
        by_host: dict[int, list[int]] = {}
        for rank in sorted(ranks):
            by_host.setdefault(rank // local, []).append(rank)
        if len(by_host) <= MOST_HOSTS:
            return ",".join(f"{hosts[host]}/{name_ranks(own)}" for host, own in by_host.items())
        ranks = [rank for own in by_host.values() for rank in own]
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def describe_ranks(ranks: Iterable[int]) -> str:
    """Format ranks: 'rank 2', 'ranks 0, 2'."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def parse_ranks(text: str, world_size: int) -> frozenset[int]:
    """Parse `all`, `none` or a list such as `0,3-5` to a set of ranks.

    Raises ValueError, with a message about what is allowed.
    """
    allowed = f"use all, none, or ranks from 0 to {world_size - 1} such as 0 or 0,2-3"
    words = text.strip().lower()
    if words == "all":
        return frozenset(range(world_size))
    if words == "none":
        return frozenset()
    ranks: set[int] = set()
    for part in words.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{text!r} does not name ranks: {allowed}")
        span = range(int(first), int(last if dash else first) + 1)
        if not span:
            raise ValueError(f"{part.strip()!r} counts downwards: {allowed}")
        if span[-1] >= world_size:
            raise ValueError(f"there is no rank {span[-1]}: {allowed}")
        ranks.update(span)
    return frozenset(ranks)


def fold(written: Mapping[int, Sequence[str]]) -> list[tuple[str, list[int]]]:
    """Merge the lines of all ranks into one order, each with the ranks that wrote it.

    The order within each rank is kept, and each of its lines appears once.
    """
    merged: list[tuple[str, list[int]]] = []
    known: set[str] = set()
    for rank in sorted(written):
        lines = written[rank]
        if known.isdisjoint(lines):  # as if all lines have the rank's number: fast for many ranks
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
    """Add the lines of another rank: to equal lines if possible, otherwise before the next one."""
    places: dict[str, list[int]] = {line: [] for line in lines}
    for place, (line, _) in enumerate(merged):
        if line in places:
            places[line].append(place)
    result: list[tuple[str, list[int]]] = []
    done, waiting = 0, 0
    for index, line in enumerate(lines):
        known = places[line]
        if (at := bisect_right(known, done - 1)) == len(known):
            continue
        result += merged[done : known[at]]
        result += _alone(lines[waiting:index], rank)
        result.append((line, [*merged[known[at]][1], rank]))
        done, waiting = known[at] + 1, index + 1
    result += merged[done:]
    result += _alone(lines[waiting:], rank)
    return result
