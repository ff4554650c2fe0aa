"""Descriptions of collective calls that ranks compare and people read."""

from __future__ import annotations

import functools
import hashlib
import json
import linecache
import math
import os
import sys
import threading
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from tpunb.runs.cell_lines import CellLines
from tpunb.utils.text import describe_ranks

_LIBRARIES = (
    "tpunb.worker",
    "tpunb.backends",
    "tpunb.backends.rehearsal",
    "contextlib",
    "torch_xla",
    "torch",
)


@dataclass(frozen=True)
class RankCall:
    """One call of a collective operation on one rank."""

    operation: str
    """'all_reduce sum', 'rendezvous'."""
    tensors: tuple[str, ...] = ()
    """'float32[3, 4]' for each tensor."""
    detail: str = ""
    """Other arguments that must be the same on all ranks: groups, scale."""
    label: str = ""
    """For people only, not compared: the tag of a rendezvous."""
    place: str = ""
    """The line of the user's code; only set in calls received from other ranks."""
    first_divergence: str = ""
    """This rank's line at the first collective that the ranks called from different lines."""
    circumstances: str = ""
    """Unusual circumstances of the call (see `circumstances`); only set like `place`."""
    compared: tuple[str, ...] | None = None
    """What ranks compare instead of `tensors`: shapes may differ where only sizes matter."""

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
        """16 bytes, equal on all ranks that make the same call."""
        compared = self.tensors if self.compared is None else self.compared
        content = "\n".join((self.operation, self.detail, *compared))
        return hashlib.blake2b(content.encode(), digest_size=16).digest()

    def described(self, first_divergence: str = "") -> bytes:
        """The call and the line of the user's code, for the other ranks."""
        fields = [self.operation, self.tensors, self.detail, self.label]
        return json.dumps([*fields, users_line(), first_divergence, circumstances()]).encode()

    @classmethod
    def from_description(cls, text: bytes) -> RankCall:
        """The inverse of `described`."""
        operation, tensors, *others = json.loads(text)
        return cls(operation, tuple(tensors), *others)


Kinds = tuple[tuple[Any, Sequence[int]], ...]
"""The types and shapes of tensors."""


@functools.lru_cache(maxsize=512)
def describe(
    operation: str,
    kinds: Kinds,
    detail: str = "",
    on: str = "",
    compared: tuple[str, ...] | None = None,
) -> RankCall:
    """Describe a call. Cached: each step repeats its calls, with all tensors of the model.

    `on`: ' on tpu'.
    """
    tensors = tuple(f"{_name(dtype)}{list(shape)}{on}" for dtype, shape in kinds)
    return RankCall(operation, tensors, detail, compared=compared)


@functools.lru_cache(maxsize=512)
def sizes(kinds: Kinds) -> tuple[str, ...]:
    """What ranks compare where shapes may differ: types, and numbers of elements."""
    return tuple(f"{_name(dtype)} {math.prod(shape)}" for dtype, shape in kinds)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _file_and_line(filename: str, line: int) -> str:
    return f"line {line} of {os.path.basename(filename)}"


_lines: CellLines | None = None
"""The lines of the run's cells, in a rank of a run."""


def name_cell_lines(lines: CellLines) -> None:
    """In a rank of a run: name lines of its cells in messages as 'cell [7], line 3'."""
    global _lines
    _lines = lines


_elsewhere = "On a TPU"


def name_elsewhere(phrase: str) -> None:
    """Name where the run would be if no rank compared its calls: 'On a TPU', 'With gloo alone'."""
    global _elsewhere
    _elsewhere = phrase


def elsewhere() -> str:
    """Where ranks that differ hang, for messages."""
    return _elsewhere


class CodeLine(NamedTuple):
    """A line of the user's code."""

    filename: str
    line: int
    module: Mapping[str, Any]

    def __str__(self) -> str:
        """'line 12 of train.py: xm.all_reduce(…)'."""
        name = _file_and_line if _lines is None else _lines.describe
        place = name(self.filename, self.line)
        source = linecache.getline(self.filename, self.line, dict(self.module)).strip()
        return f"{place}: {source}" if source else place

    def hash(self) -> int:
        """32 bits, the same on all ranks for the same line."""
        return zlib.crc32(self.filename.encode(), self.line)


def running_line() -> CodeLine | None:
    """The line of the user's code that is running, or None (a few µs).

    A line of the run's script if one is running, otherwise the innermost line outside of the
    libraries. torch calls hooks of a backward pass in a thread of its own; in it, the line of the
    main thread, which waits in `backward()`.
    """
    line = _find_line(sys._getframe(1))
    if line is None and (ident := threading.main_thread().ident) != threading.get_ident():
        line = _find_line(sys._current_frames().get(ident or 0))
    return line


def _find_line(frame: FrameType | None) -> CodeLine | None:
    first: FrameType | None = None
    while frame is not None:
        if _lines is not None and frame.f_code.co_filename in _lines:
            first = frame
            break
        if first is None and not _of_library(frame.f_globals.get("__name__", "")):
            first = frame
            if _lines is None:
                break
        frame = frame.f_back
    return first and CodeLine(first.f_code.co_filename, first.f_lineno, first.f_globals)


def users_frames() -> list[FrameType]:
    """The frames of the user's code that is running, the innermost first."""
    for frame in (sys._getframe(1), sys._current_frames().get(threading.main_thread().ident or 0)):
        frames = []
        while frame is not None:
            if _is_users(frame):
                frames.append(frame)
            frame = frame.f_back
        if frames:
            break
    return frames


def _is_users(frame: FrameType) -> bool:
    if _lines is None:
        return not _of_library(frame.f_globals.get("__name__", ""))
    return frame.f_code.co_filename in _lines


@functools.cache
def _of_library(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _LIBRARIES)


def users_line() -> str:
    """The line of the user's code that is running: 'line 12 of train.py: xm.all_reduce(…)'."""
    return str(running_line() or "")


def is_other_thread() -> bool:
    """True in a thread that the user's code or a library has started in Python.

    False in torch's own threads, which run hooks of a backward pass: the main thread waits for
    them.
    """
    if threading.get_ident() == threading.main_thread().ident:
        return False
    return not isinstance(threading.current_thread(), threading._DummyThread)


def circumstances() -> str:
    """Circumstances that may explain an unexpected collective call, or ''.

    They are an exception being handled, which a `finally` or `except` that calls a collective
    hides; and a thread other than the main one, because threads may run in a different order on
    each rank.
    """
    found = []
    error, line = sys.exc_info()[1], None
    while error is not None and (line := _raised_at(error)) is None:
        error = error.__context__  # this error is being handled in a library
    if error is not None:
        text = traceback.format_exception_only(type(error), error)[-1].strip()
        found.append(f"after {text[:200]}\n      {line}")
    if is_other_thread():
        found.append(f"in thread {threading.current_thread().name}")
    return "\n      ".join(found)


def _raised_at(error: BaseException) -> CodeLine | None:
    """The innermost line of the user's code in an exception's traceback."""
    found, tb = None, error.__traceback__
    while tb is not None:
        if _is_users(tb.tb_frame):
            name = tb.tb_frame.f_code.co_filename
            found = CodeLine(name, tb.tb_lineno, tb.tb_frame.f_globals)
        tb = tb.tb_next
    return found


def describe_mismatch(calls: Mapping[int, RankCall]) -> str:
    """The error message when ranks have made different calls."""
    ranks_by_call: dict[str, list[int]] = {}
    for rank, call in calls.items():
        text = f"{call}{_first_difference(call, calls)}"
        text = "\n      ".join(filter(None, (text, call.place, call.circumstances)))
        ranks_by_call.setdefault(text, []).append(rank)
    lines = [f"  {describe_ranks(ranks)}: {text}" for text, ranks in ranks_by_call.items()]
    return "\n".join(
        [
            "the ranks called different collectives at the same time:",
            *lines,
            "Every rank must make the same collective calls, in the same order, with tensors of "
            f"the same shapes and types. {elsewhere()} this would hang or crash.",
            *describe_first_divergence(
                {rank: call.first_divergence for rank, call in calls.items()}
            ),
        ]
    )


def describe_first_divergence(first_divergences: Mapping[int, str]) -> list[str]:
    """The lines of a message about the first collective called from different lines, if any.

    Ranks may make the same call from different lines (one of them in an `else`). But if calls do
    not match later, the cause is most often there: a collective under a condition on the rank was
    matched with the next one of the other ranks.
    """
    places: dict[str, list[int]] = {}
    for rank, place in sorted(first_divergences.items()):
        if place:
            places.setdefault(place, []).append(rank)
    lines = [f"  {describe_ranks(ranks)}: {place}" for place, ranks in places.items()]
    if not lines:
        return []
    return ["The first collective that the ranks called from different lines:", *lines]


def _first_difference(call: RankCall, calls: Mapping[int, RankCall]) -> str:
    """', tensor 17 is float32[3]' for the first difference of lists of equal length, else ''."""
    others = [other.tensors for other in calls.values()]
    if len(call.tensors) < 2 or any(len(tensors) != len(call.tensors) for tensors in others):
        return ""
    for index, kinds in enumerate(zip(*others, strict=True)):
        if len(set(kinds)) > 1:
            return f", tensor {index + 1} is {call.tensors[index]}"
    return ""
