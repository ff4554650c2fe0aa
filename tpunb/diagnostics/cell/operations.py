"""Operations of a cell, and the cause of a recompilation: the first operation that differs.

Two programs of one line are (nearly) the same steps of the same loop. The first operation that
differs is the origin of the difference, and all later ones inherit it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.utils.text import excerpt

_MOST = 64
"""Maximal number of members of a list or tuple that are described."""


class Shape(NamedTuple):
    """A tensor as an argument or a result."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        """'32×784 float32'."""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{'×'.join(map(str, self.sizes))} {kind}" if self.sizes else f"a single {kind}"


class Op(NamedTuple):
    """A call of one of torch's functions or operators with a tensor on the device."""

    name: str
    place: SourceLine | None
    """The innermost line of the notebook that led to the call, if any."""
    optimizer: bool
    """True if an optimizer's step made the call."""
    given: tuple[object, ...]
    """Arguments: shapes, numbers, strings; tuples of these; for other types, their names."""
    result: object

    @property
    def key(self) -> tuple[str, SourceLine | None]:
        """Identifies the call without its arguments."""
        return self.name, self.place

    @property
    def moves(self) -> bool:
        """True if it moves a tensor from host to device, which is not part of a program."""
        return on_device(self.result) and on_cpu(self.given) and not on_device(self.given)

    @property
    def builds(self) -> bool:
        """False for calls outside a program: reading a size, a `to` that changes nothing."""
        if self.name == "to" and self.given[:1] == (self.result,):
            return False
        return self.result is None or _has_tensor(self.result)


def describe_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[object, ...]:
    if not kwargs:
        return tuple([_describe(value, 2) for value in args])
    return (
        *[_describe(value, 2) for value in args],
        *[(k, _describe(v, 2)) for k, v in kwargs.items()],
    )


def describe_result(value: Any) -> object:
    return _describe(value, 1)


def on_device(described: object) -> bool:
    """True if a tensor on an accelerator is among them."""
    if isinstance(described, Shape):
        return described.device not in ("cpu", "meta")
    return isinstance(described, tuple) and any(map(on_device, described))


def on_cpu(described: object) -> bool:
    """True if a tensor on the CPU is among them."""
    if isinstance(described, Shape):
        return described.device == "cpu"
    return isinstance(described, tuple) and any(map(on_cpu, described))


def shapes_in(described: object) -> tuple[Shape, ...]:
    """The tensors among them, in order."""
    if isinstance(described, Shape):
        return (described,)
    if not isinstance(described, tuple):
        return ()
    return tuple(shape for value in described for shape in shapes_in(value))


def _has_tensor(described: object) -> bool:
    if isinstance(described, Shape):
        return True
    return isinstance(described, tuple) and any(map(_has_tensor, described))


def _describe(value: Any, depth: int) -> object:
    if isinstance(value, torch.Tensor):
        return Shape(tuple(value.shape), value.dtype, value.device.type)
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (torch.dtype, torch.device, torch.Size)):
        return str(value)
    if isinstance(value, (list, tuple)) and depth:
        return tuple([_describe(member, depth - 1) for member in value[:_MOST]])
    if isinstance(value, slice):
        return (
            "slice",
            _describe(value.start, 0),
            _describe(value.stop, 0),
            _describe(value.step, 0),
        )
    return type(value).__name__


Kind = Literal["shape", "dtype", "data", "constant", "branch", "start", "hidden", "other"]
SPECIAL = (0, 1)
"""Numbers that torch_xla compiles into the program; others are data (XLA_NO_SPECIAL_SCALARS)."""
ALIKE = 0.3
"""Share of equal operations above which two programs count as variants of one."""


class Window(NamedTuple):
    """The operations that led to a program, since the previous one of the same line."""

    ops: Sequence[Op]
    tail: int = 0
    """Number of operations at the beginning that are in the loop's body below the end of a step."""
    first: bool = False
    """True for the first window of its line, which may include operations before the loop."""


@dataclass(frozen=True)
class Cause:
    """The first difference between two programs, and its place.

    `kind`: 'shape' or 'dtype' of a tensor; 'data': the shape of a result depends on the data;
    'constant': another number or string argument; 'branch': other lines ran; 'start': operations of
    the first steps only (an optimizer creates its state, a sum starts with a number); 'hidden': no
    operation differs; 'other': a new program with nothing to compare it to.
    """

    kind: Kind
    place: SourceLine | None = None
    op: str = ""
    now: str = ""
    before: str = ""
    rows: tuple[int, int] | None = None
    """Now and before, if only the first size differs."""
    skipped: bool = False
    """For a branch: True if the operation ran before and not now."""


def similarity(now: Window, before: Window) -> float:
    """The share of operations that two programs have in common at their start and end."""
    ops, others, _ = _aligned(now, before)
    most = max(len(ops), len(others))
    if not most:
        return 1.0
    front = _common(ops, others)
    back = _common(ops[front:][::-1], others[front:][::-1])
    return (front + back) / most


def _common(ops: Sequence[Op], others: Sequence[Op]) -> int:
    for number, (a, b) in enumerate(zip(ops, others)):  # noqa: B905 (as far as both go)
        if a.key != b.key:
            return number
    return min(len(ops), len(others))


def find_cause(now: Window, before: Window, harmless: AbstractSet[tuple[object, ...]]) -> Cause:
    """Return why `now` was compiled although `before` was known.

    `harmless`: arguments that differed between two runs of one program (`varying_arguments`).
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


def find_change(
    op: Op,
    now: tuple[Sequence[Shape], Sequence[Shape]],
    before: tuple[Sequence[Shape], Sequence[Shape]],
) -> Cause | None:
    """Return the first difference of two calls of one operator: the shapes given, and returned.

    None if they differ in the number of tensors.
    """
    given, results = (
        [(a, b) for a, b in zip(one, other, strict=False) if a[:2] != b[:2]]
        for one, other in zip(now, before, strict=True)
    )
    if given:
        return _shapes(op, *given[0])
    if not results or len(now[0]) != len(before[0]):
        return None
    if now[0]:
        after, was = map(str, results[0])
        return Cause("data", op.place, op.name, after, was)
    return _shapes(op, *results[0])  # it makes a tensor


def is_variant(now: Window, before: Window) -> Cause | None:
    """Return why `now` certainly differs from `before` as a program; None if it may be the same."""
    cause = find_cause(now, before, _EVERYTHING)
    return cause if cause.kind in ("shape", "dtype", "data", "branch") else None


class _Everything(frozenset[tuple[object, ...]]):
    def __contains__(self, item: object) -> bool:
        return True


_EVERYTHING = _Everything()


def _aligned(now: Window, before: Window) -> tuple[Sequence[Op], Sequence[Op], bool]:
    """Drop operations before the loop if only `before` has them, and return whether any were."""
    ops = now.ops[now.tail :]
    if before.first and not now.first and ops:
        for number, op in enumerate(before.ops):
            if op.key == ops[0].key:
                return ops, before.ops[number:], number > 0 or now.tail > 0
    return now.ops, before.ops, False


def varying_arguments(now: Window, before: Window) -> set[tuple[object, ...]]:
    """Arguments that differ between two runs of one program, so that they do not change it."""
    varying: set[tuple[object, ...]] = set()
    if len(now.ops) == len(before.ops):
        for a, b in zip(now.ops, before.ops, strict=True):
            if a is not b and a.given != b.given and a.key == b.key:
                varying.update((*a.key, n) for n, _, _ in _differences(a.given, b.given))
    return varying


def _differences(now: object, before: object, where: str = "") -> list[tuple[str, object, object]]:
    if isinstance(now, tuple) and isinstance(before, tuple) and not isinstance(now, Shape):
        if len(now) != len(before):
            return [(where, now, before)]
        return [
            difference
            for n, (a, b) in enumerate(zip(now, before, strict=True))
            for difference in _differences(a, b, f"{where}.{n}")
        ]
    same = now == before and type(now) is type(before)
    return [] if same or (now != now and before != before) else [(where, now, before)]


def _arguments(
    a: Op, b: Op, harmless: AbstractSet[tuple[object, ...]], strict: bool
) -> Cause | None:
    for where, now, before in _differences(a.given, b.given):
        if isinstance(now, Shape) and isinstance(before, Shape):
            if now[:2] == before[:2]:
                continue  # only the device differs, as for a model that is moved twice
            return _shapes(a, now, before)
        if isinstance(now, Shape) or isinstance(before, Shape):
            # A sum that starts with a number, as in `total = 0.0`.
            return Cause("start", a.place, a.name, str(now), str(before))
        if (*a.key, where) in harmless or (strict and _is_data(a.name, now, before)):
            continue
        return Cause("constant", a.place, a.name, *_short_reprs(now, before))
    if a.result != b.result:
        for _, now, before in _differences(a.result, b.result):
            if (
                isinstance(now, Shape)
                and isinstance(before, Shape)
                and now.sizes != before.sizes
                and a.given == b.given
            ):
                return Cause("data", a.place, a.name, str(now), str(before))
    return None


_BAKED = ("__pow__", "pow", "__rpow__", "layer_norm", "batch_norm", "group_norm")
"""Functions whose float arguments are part of the program (measured on 2.9)."""


def _is_data(name: str, now: object, before: object) -> bool:
    """True if a number is data of the program: a float that is neither 0 nor 1."""
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
    """Other lines ran: find them by removing the common end."""
    back = _common(now[at:][::-1], before[at:][::-1])
    parts = now[at : len(now) - back], before[at : len(before) - back]
    new, old = ([op for op in part if not op.moves] for part in parts)
    stepped, had_stepped = (any(op.optimizer for op in ops) for ops in (new, old))
    if stepped != had_stepped or all(op.optimizer for op in (*new, *old)):
        # The first optimizer step creates its state; with gradient accumulation not every step has
        # an optimizer step. Or only the moves to the device differ.
        return Cause("start")
    first = next((op for op in (*new, *old) if not op.optimizer), None)
    assert first is not None
    skipped = first not in new
    return Cause("branch", first.place, first.name, skipped=skipped)


def _short_reprs(now: object, before: object) -> tuple[str, str]:
    """Both values as text; long texts start near the difference."""
    texts = repr(now), repr(before)
    equal = next((n for n, (a, b) in enumerate(zip(*texts)) if a != b), 0)  # noqa: B905
    around = equal if equal > 20 else 0
    return excerpt(texts[0], 40, around=around), excerpt(texts[1], 40, around=around)
