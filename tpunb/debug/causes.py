"""Why XLA compiled again: by comparing what was noted of this program and of one before.

Two programs of one line are the same steps of the same loop, or nearly. The first operation that
differs is where the difference comes from: all that follows has it from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tpunb.debug.operations import Op, Shape
from tpunb.debug.place import Place

Kind = Literal["shape", "dtype", "data", "constant", "branch", "start", "hidden", "other"]
SPECIAL = (0, 1)
"""Numbers that torch_xla writes into the program; others are data (XLA_NO_SPECIAL_SCALARS)."""
ALIKE = 0.3
"""The share of operations in which two programs must agree to be variants of one."""


class Window(NamedTuple):
    """The operations that led to a program, since the one before from the same line."""

    ops: Sequence[Op]
    tail: int = 0
    """So many of the first stand in the loop's body below the end of a step."""
    first: bool = False
    """The line's first: what came before the loop may be in it."""


@dataclass(frozen=True)
class Cause:
    """What differs first, and where.

    `kind`: a tensor's shape or dtype differs; the shape of a result depends on the data; another
    number or word was given; other lines ran; 'start': what only the first steps do (an optimizer
    makes its state, a sum begins with a number); 'hidden': no operation differs; 'other': another
    program, nothing to compare with.
    """

    kind: Kind
    place: Place | None = None
    op: str = ""
    now: str = ""
    before: str = ""
    rows: tuple[int, int] | None = None
    """Now and before, where only the first size differs."""
    skipped: bool = False
    """Of a branch: what ran before did not run now."""


def alike(one: Window, two: Window) -> float:
    """The share of operations that two programs have in common, at their begin and their end."""
    ops, others, _ = _aligned(one, two)
    most = max(len(ops), len(others))
    if not most:
        return 1.0
    front = _common(ops, others)
    back = _common(ops[front:][::-1], others[front:][::-1])
    return (front + back) / most


def _common(one: Sequence[Op], two: Sequence[Op]) -> int:
    for number, (a, b) in enumerate(zip(one, two)):  # noqa: B905 (as far as both go)
        if a.key != b.key:
            return number
    return min(len(one), len(two))


def compare(now: Window, before: Window, harmless: AbstractSet[tuple[object, ...]]) -> Cause:
    """Why `now` was compiled when `before` was known.

    `harmless`: numbers that have differed between two runs of the same program (`varying`).
    """
    ops, others, cut = _aligned(now, before)
    for strict in (True, False):  # which floats are data is not known for every function
        for number, (a, b) in enumerate(zip(ops, others)):  # noqa: B905
            if a.key != b.key:
                return _branch(ops, others, number)
            if a != b and (cause := _arguments(a, b, harmless, strict)):
                return cause
        if len(ops) != len(others):
            return _branch(ops, others, min(len(ops), len(others)))
    return Cause("start" if cut else "hidden")


def is_variant(now: Window, before: Window) -> Cause | None:
    """Why `now` is surely another program than `before`; None if it may be the same."""
    cause = compare(now, before, _EVERYTHING)
    return cause if cause.kind in ("shape", "dtype", "data", "branch") else None


class _Everything(frozenset[tuple[object, ...]]):
    def __contains__(self, item: object) -> bool:
        return True


_EVERYTHING = _Everything()


def _aligned(now: Window, before: Window) -> tuple[Sequence[Op], Sequence[Op], bool]:
    """Without what came before the loop, if only `before` has that; whether anything was cut."""
    ops = now.ops[now.tail :]
    if before.first and not now.first and ops:
        for number, op in enumerate(before.ops):
            if op.key == ops[0].key:
                return ops, before.ops[number:], number > 0 or now.tail > 0
    return now.ops, before.ops, False


def varying(now: Window, before: Window) -> set[tuple[object, ...]]:
    """Where two runs of one program were given different numbers: that makes no other program."""
    found: set[tuple[object, ...]] = set()
    if len(now.ops) == len(before.ops):
        for a, b in zip(now.ops, before.ops, strict=True):
            if a is not b and a.given != b.given and a.key == b.key:
                found.update((*a.key, n) for n, _, _ in _differences(a.given, b.given))
    return found


def _differences(now: object, before: object, where: str = "") -> list[tuple[str, object, object]]:
    if isinstance(now, tuple) and isinstance(before, tuple) and not isinstance(now, Shape):
        if len(now) != len(before):
            return [(where, now, before)]
        return [
            one
            for n, (a, b) in enumerate(zip(now, before, strict=True))
            for one in _differences(a, b, f"{where}.{n}")
        ]
    same = now == before and type(now) is type(before)
    return [] if same or (now != now and before != before) else [(where, now, before)]


def _arguments(
    a: Op, b: Op, harmless: AbstractSet[tuple[object, ...]], strict: bool
) -> Cause | None:
    for where, now, before in _differences(a.given, b.given):
        if isinstance(now, Shape) and isinstance(before, Shape):
            return _shapes(a, now, before)
        if isinstance(now, Shape) or isinstance(before, Shape):
            # A sum that begins with a number, as in `total = 0.0`.
            return Cause("start", a.place, a.name, str(now), str(before))
        if (*a.key, where) in harmless or (strict and _is_data(a.name, now, before)):
            continue
        return Cause("constant", a.place, a.name, _word(now), _word(before))
    if a.made != b.made:
        for _, now, before in _differences(a.made, b.made):
            if isinstance(now, Shape) and isinstance(before, Shape) and a.given == b.given:
                return Cause("data", a.place, a.name, str(now), str(before))
    return None


_BAKED = ("__pow__", "pow", "__rpow__", "layer_norm", "batch_norm", "group_norm")
"""Functions whose numbers are part of the program although they are floats (measured on 2.9)."""


def _is_data(name: str, now: object, before: object) -> bool:
    """Whether a number goes into the program as data: floats that are neither 0 nor 1."""
    return (
        isinstance(now, float)
        and isinstance(before, float)
        and now not in SPECIAL
        and before not in SPECIAL
        and name not in _BAKED
    )


def _shapes(op: Op, now: Shape, before: Shape) -> Cause:
    if now.sizes == before.sizes:
        return Cause("dtype", op.place, op.name, str(now), str(before))
    rows = None
    if len(now.sizes) == len(before.sizes) > 0 and now.sizes[1:] == before.sizes[1:]:
        rows = now.sizes[0], before.sizes[0]
    return Cause("shape", op.place, op.name, str(now), str(before), rows)


def _branch(now: Sequence[Op], before: Sequence[Op], at: int) -> Cause:
    """Other lines ran: which, by what is left when the common end is taken off."""
    back = _common(now[at:][::-1], before[at:][::-1])
    parts = now[at : len(now) - back], before[at : len(before) - back]
    new, old = ([op for op in part if not op.moves] for part in parts)
    stepped, had_stepped = (any(op.optimizer for op in ops) for ops in (new, old))
    if stepped != had_stepped or all(op.optimizer for op in (*new, *old)):
        # Its first step makes its state; where gradients are accumulated, not every one has it.
        # Or nothing differs but what was brought to the device.
        return Cause("start")
    first = next((op for op in (*new, *old) if not op.optimizer), None)
    assert first is not None
    skipped = first not in new
    return Cause("branch", first.place, first.name, skipped=skipped)


def _word(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
