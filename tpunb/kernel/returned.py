"""Values that earlier runs returned to the kernel, by train cell; later runs read them as well."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpunb.kernel.options import RESULT
from tpunb.notebook.convert import earlier_values
from tpunb.notebook.models import Absent, Cell, EarlierRun, EarlierValues
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.utils.literals import MOST_ITEMS, literal

DEEPEST = 4
"""Levels of lists, tuples and dicts that are searched for results of runs."""


@dataclass
class ReturnedRun:
    """One run, and the variables that it returns to the kernel."""

    number: int | None
    """The execution count of the cell that started it, or attached to it."""
    run: RunDir
    returns: tuple[str, ...]
    """The names given to `--returns`."""
    out: str | None
    background: bool = False
    detached: bool = False
    raises: bool = True
    bound: tuple[str, ...] = ()
    """The names of `returns` that have become variables of the kernel."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The names that could not be returned, and why."""

    def bind(self, result: RunResult) -> None:
        """Note that the result's values have become variables of the kernel."""
        self.bound = tuple(result.returns)
        self.failed = dict(result.returns_failed)

    @property
    def active(self) -> bool:
        return state.run_state(self.run).active

    def for_later_runs(self) -> EarlierRun | None:
        """Return this run's values in the form that later runs read; None if it has none."""
        if (self.background and self.active) or self.detached or not self.run.result.exists():
            return None
        return EarlierRun(
            str(self.run.path), self.bound, self.out, handle=self.background, raises=self.raises
        )

    def absent(self) -> Iterator[tuple[str, Absent]]:
        """Yield the names that the kernel does not have from this run, and why."""
        wanted = [name for name in self.returns if name not in self.bound]
        handle = f"`{self.out}.wait()`" if self.out else "the `.wait()` of its handle"
        if self.detached:
            why, instead = "whose run is detached", f"run `%tpu_attach {self.run.id}`"
        elif not self.background:
            why = "which returned nothing"
            instead = "run that cell again"
            if not self.run.result.exists():
                why = f"whose run folder {self.run.path} no longer exists"
                wanted = list(self.returns)
        elif self.active:
            why, instead = "which is still running in the background", f"wait for it with {handle}"
            wanted += [self.out] if self.out else []
        else:
            why = "whose background run has ended but was never waited for"
            instead = f"call {handle}"
        for name in wanted:
            if name in self.failed:
                yield name, Absent(f"which could not return it ({self.failed[name]})", instead)
            else:
                yield name, Absent(why, instead)


class Launched:
    """Recognises the result and value that one call of `tpunb.launch` returned to its caller.

    It keeps neither of them alive. A value is recognised by the objects in it: what was changed
    inside a tensor since is not noticed.
    """

    def __init__(self, result: RunResult) -> None:
        self.folder = str(result.dir)
        self._result = weakref.ref(result)
        self._form, objects = _take_apart(result.returns.get(RESULT), DEEPEST)
        self._objects = [weakref.ref(each) for each in objects]

    @property
    def alive(self) -> bool:
        """True while a variable may hold the result or its value."""
        return any(ref() is not None for ref in (self._result, *self._objects))

    def expression(self, value: object) -> str | None:
        """Return code that reads the value from the run folder; None if it is another value."""
        if value is self._result():
            return f"{earlier_values.ENDED}.read_run({self.folder!r})"
        form, objects = _take_apart(value, DEEPEST)
        known = [ref() for ref in self._objects]
        if not known or form != self._form or list(map(id, known)) != list(map(id, objects)):
            return None
        return f"{earlier_values.ENDED}.read_run({self.folder!r}, {RESULT!r}).returns[{RESULT!r}]"


def _take_apart(value: object, depth: int) -> tuple[object, list[Any]]:
    """Return the form of a value, which is compared, and the objects in it, such as tensors.

    The form of what can be neither compared nor told apart is unlike every other.
    """
    if (text := literal(value)) is not None:
        return text, []
    kind = type(value)
    if kind in (list, tuple, dict) and depth:
        assert isinstance(value, list | tuple | dict)
        items = list(value.items()) if isinstance(value, dict) else list(value)
        parts = [_take_apart(item, depth - 1) for item in items[:MOST_ITEMS]]
        return (kind, len(items), [form for form, _ in parts]), [x for _, own in parts for x in own]
    try:
        weakref.ref(value)
    except TypeError:
        return object(), []
    return kind, [value]


class Returned:
    """The deliveries of one kernel, oldest first."""

    def __init__(self) -> None:
        self._deliveries: list[ReturnedRun] = []
        self._launched: list[Launched] = []

    def add_launched(self, result: RunResult) -> None:
        self._launched = [*(each for each in self._launched if each.alive), Launched(result)]

    def left_by_launches(self, user_ns: Mapping[str, object]) -> Callable[[str], str | None]:
        """Return a function from a kernel variable's name to code for its value in a later run.

        It supports results of runs and their values, plain values, and lists, tuples and dicts of
        these; it returns None for any other value.
        """

        def expression(name: str) -> str | None:
            return self._write(user_ns[name], DEEPEST) if name in user_ns else None

        return expression

    def _write(self, value: object, depth: int) -> str | None:
        if (text := literal(value)) is not None:
            return text
        for launched in reversed(self._launched):
            if (text := launched.expression(value)) is not None:
                return text
        kind = type(value)
        if kind not in (list, tuple, dict) or not depth:
            return None
        assert isinstance(value, list | tuple | dict)
        if len(value) > MOST_ITEMS:
            return None
        parts = [self._write(part, depth - 1) for part in value]
        if isinstance(value, dict):
            parts = [
                None if key is None or item is None else f"{key}: {item}"
                for key, item in zip(
                    parts, (self._write(item, depth - 1) for item in value.values()), strict=True
                )
            ]
        written = [part for part in parts if part is not None]
        if len(written) < len(parts):
            return None
        text = ", ".join(written)
        if isinstance(value, tuple):
            return f"({text}{',' if len(written) == 1 else ''})"
        return f"{{{text}}}" if isinstance(value, dict) else f"[{text}]"

    def add(self, delivery: ReturnedRun) -> ReturnedRun:
        """Remember a run that was started, or that ended while it was followed."""
        self._deliveries.append(delivery)
        return delivery

    def by_cell(self, cells: Iterable[Cell]) -> dict[int, EarlierValues]:
        """Return the values that each cell's runs returned to the kernel, by the cell's index.

        A cell's values are those of all its executions: if the latest one failed, the values of
        the one before are still there.
        """
        by_cell: dict[int, EarlierValues] = {}
        for cell in cells:
            own = [each for each in self._deliveries if each.number in cell.executions]
            if own:
                got = EarlierValues(
                    tuple(_latest(run for each in own if (run := each.for_later_runs())))
                )
                absent = dict(own[-1].absent())
                by_cell[cell.index] = replace(
                    got, absent={name: absent[name] for name in absent if name not in got.names}
                )
        return by_cell


def _latest(runs: Iterable[EarlierRun]) -> list[EarlierRun]:
    """Return the runs without names that a later run has assigned again, and without empty runs."""
    kept: list[EarlierRun] = []
    bound: set[str] = set()
    for run in reversed(list(runs)):
        names = tuple(name for name in run.names if name not in bound)
        out = run.out if run.out not in bound else None
        if names or out is not None or not kept:
            kept.append(replace(run, names=names, out=out, handle=run.handle and out is not None))
        bound |= {*run.names, *([run.out] if run.out else [])}
    return kept[::-1]
