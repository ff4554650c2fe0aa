"""What a rank is about to do with the others, so that ranks can compare it and people read it."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

_LIBRARIES = ("tpunb.worker", "contextlib", "torch_xla", "torch")


@dataclass(frozen=True)
class Call:
    """One call of a collective operation on one rank."""

    operation: str
    """'all_reduce sum', 'rendezvous'."""
    tensors: tuple[str, ...] = ()
    """'float32[3, 4]' for each tensor."""
    detail: str = ""
    """Whatever else must be the same on all ranks: groups, scale."""
    label: str = ""
    """What helps a person and need not be the same: a rendezvous' tag."""
    place: str = ""
    """Where in the user's code; filled in when the call is described to others."""
    apart: str = ""
    """Where this rank was when the ranks met from different lines for the first time."""

    def __str__(self) -> str:
        """'all_reduce sum of 62 tensors (float32[10, 3], …)'."""
        text = f"{self.operation} {self.label}".rstrip()
        if len(self.tensors) == 1:
            text += f" of {self.tensors[0]}"
        elif self.tensors:
            text += f" of {len(self.tensors)} tensors ({self.tensors[0]}, …)"
        return f"{text}, {self.detail}" if self.detail else text

    @functools.cached_property
    def digest(self) -> bytes:
        """16 bytes that are equal on all ranks that make the same call."""
        content = "\n".join((self.operation, self.detail, *self.tensors))
        return hashlib.blake2b(content.encode(), digest_size=16).digest()

    def described(self, apart: str = "") -> bytes:
        """Everything, with the place in the user's code, for the other ranks."""
        values = [self.operation, self.tensors, self.detail, self.label, users_line(), apart]
        return json.dumps(values).encode()

    @classmethod
    def from_description(cls, text: bytes) -> Call:
        """The inverse of `described`."""
        operation, tensors, *others = json.loads(text)
        return cls(operation, tuple(tensors), *others)


def _file_and_line(filename: str, line: int) -> str:
    return f"line {line} of {os.path.basename(filename)}"


_places: Callable[[str, int], str] = _file_and_line
_script = ""
"""The file of the run's cells, in a rank of a run."""


def name_places(script: str, place: Callable[[int], str]) -> None:
    """In a rank of a run: say `place(line)` for the lines of its script, 'cell [7], line 3'."""
    global _places, _script
    _script = script

    def places(filename: str, line: int) -> str:
        return place(line) if filename == script else _file_and_line(filename, line)

    _places = places


class Where(NamedTuple):
    """A line of the user's code."""

    filename: str
    line: int
    module: Mapping[str, Any]

    def __str__(self) -> str:
        """'line 12 of train.py: xm.all_reduce(…)'."""
        place = _places(self.filename, self.line)
        source = linecache.getline(self.filename, self.line, dict(self.module)).strip()
        return f"{place}: {source}" if source else place

    def mark(self) -> int:
        """32 bits that are the same on all ranks for the same line, and others for others."""
        return zlib.crc32(self.filename.encode(), self.line)


def where() -> Where | None:
    """The line of the user's code that is running; None if there is none (a few µs).

    A line of the run's script, if one is running; else the first that is not of torch's.
    """
    first: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _script:
            first = frame
            break
        if first is None and not _of_library(frame.f_globals.get("__name__", "")):
            first = frame
            if not _script:
                break
        frame = frame.f_back
    return first and Where(first.f_code.co_filename, first.f_lineno, first.f_globals)


@functools.cache
def _of_library(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _LIBRARIES)


def users_line() -> str:
    """The line of the user's code that is running: 'line 12 of train.py: xm.all_reduce(…)'."""
    return str(where() or "")


def disagreement(calls: Mapping[int, Call]) -> str:
    """The message for ranks that came to the same moment with different calls."""
    brought: dict[str, list[int]] = {}
    for rank, call in calls.items():
        text = f"{call}{_first_difference(call, calls)}"
        brought.setdefault(f"{text}\n      {call.place}" if call.place else text, []).append(rank)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in brought.items()
    ]
    return "\n".join(
        [
            "the ranks called different collectives at the same time:",
            *lines,
            "Every rank must make the same collective calls, in the same order, with tensors of "
            "the same shapes and types. On a TPU this would hang or crash.",
            *parting({rank: call.apart for rank, call in calls.items()}),
        ]
    )


def parting(apart: Mapping[int, str]) -> list[str]:
    """Lines about where ranks met from different lines for the first time, if they did.

    Ranks that make the same call from different lines are not wrong (one may wait in an
    `else`). But where calls do not fit in the end it is most often where it began: a collective
    under a condition on the rank met the next one of the others.
    """
    places: dict[str, list[int]] = {}
    for rank, place in sorted(apart.items()):
        if place:
            places.setdefault(place, []).append(rank)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {place}"
        for place, ranks in places.items()
    ]
    return (
        ["They met from different lines for the first time in collective", *lines] if lines else []
    )


def _first_difference(call: Call, calls: Mapping[int, Call]) -> str:
    """', tensor 17 is float32[3]' where lists of the same length differ first; '' otherwise."""
    others = [other.tensors for other in calls.values()]
    if len(call.tensors) < 2 or any(len(tensors) != len(call.tensors) for tensors in others):
        return ""
    for index, kinds in enumerate(zip(*others, strict=True)):
        if len(set(kinds)) > 1:
            return f", number {index + 1} is {call.tensors[index]}"
    return ""
