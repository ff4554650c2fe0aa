"""What the kernel has got from its runs, by the cells that brought it: what later runs get too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tpunb.kernel.options import RESULT
from tpunb.notebook.convert import handed
from tpunb.notebook.models import Absent, Cell, Handed, HandedRun
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.utils.digests import differ, digest
from tpunb.utils.literals import MOST_ITEMS, literal

DEEPEST = 4
"""Levels of lists, tuples and dicts in which results of runs are looked for."""


@dataclass
class Delivery:
    """One run, and what it was to bring into the kernel."""

    number: int | None
    """The execution of the cell that started it, or attached to it."""
    run: RunDir
    returns: tuple[str, ...]
    """Of `--returns`."""
    out: str | None
    background: bool = False
    detached: bool = False
    raises: bool = True
    bound: tuple[str, ...] = ()
    """Those of `returns` that are variables of the kernel now."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Those that did not arrive, and why."""

    def bind(self, result: RunResult) -> None:
        """The values of the result have become variables of the kernel."""
        self.bound = tuple(result.returns)
        self.failed = dict(result.returns_failed)

    @property
    def active(self) -> bool:
        """Whether the run goes on."""
        return state.run_state(self.run).active

    def handed(self) -> HandedRun | None:
        """As later runs get it; None if there is nothing to get."""
        if (self.background and self.active) or self.detached or not self.run.result.exists():
            return None
        return HandedRun(
            str(self.run.path), self.bound, self.out, handle=self.background, raises=self.raises
        )

    def absent(self) -> Iterator[tuple[str, Absent]]:
        """What it has not brought, and why."""
        wanted = [name for name in self.returns if name not in self.bound]
        handle = f"`{self.out}.wait()`" if self.out else "the `.wait()` of its handle"
        if self.detached:
            why, instead = "whose run is detached", f"`%tpu_attach {self.run.id}` brings it"
        elif not self.background:
            why = "which returned nothing"
            instead = "run that cell again"
            if not self.run.result.exists():
                why = f"whose run folder, {self.run.path}, is not there any more"
                wanted = list(self.returns)
        elif self.active:
            why, instead = "which still runs in the background", f"wait for it with {handle}"
            wanted += [self.out] if self.out else []
        else:
            why = "whose run in the background has ended, and nobody has waited for it"
            instead = f"{handle} brings it"
        for name in wanted:
            if name in self.failed:
                yield name, Absent(f"which could not return it ({self.failed[name]})", instead)
            else:
                yield name, Absent(why, instead)


class Launched:
    """What one call of `tpunb.launch` has returned to its caller, recognised when it is seen again.

    Nothing is kept alive by it.
    """

    def __init__(self, result: RunResult) -> None:
        self.folder = str(result.dir)
        self._result = weakref.ref(result)
        value = result.returns.get(RESULT)
        self._id = id(value)
        self._digest = digest(value)

    def expression(self, value: object) -> str | None:
        """Code that reads a value from the run folder, if it is the result or in its `returns`."""
        if value is self._result():
            return f"{handed.ENDED}.read_run({self.folder!r})"
        if id(value) != self._id or self._digest is None:
            return None
        # Another value may have the memory of one that is gone.
        now = digest(value)
        same = now is not None and not differ(now, self._digest)
        if not same:
            return None
        return f"{handed.ENDED}.read_run({self.folder!r}, {RESULT!r}).returns[{RESULT!r}]"


class Returned:
    """The deliveries of one kernel, oldest first."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._launched: list[Launched] = []

    def add_launched(self, result: RunResult) -> None:
        """Remember what a call of `tpunb.launch` gives its caller."""
        self._launched.append(Launched(result))

    def left_by_launches(self, user_ns: Mapping[str, object]) -> Callable[[str], str | None]:
        """For a variable of the kernel an expression with its value in a later run.

        For results of runs and their values, for plain values, and for lists, tuples and dicts of
        these. None for any other.
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

    def add(self, delivery: Delivery) -> Delivery:
        """Remember a run that was started, or that has ended."""
        self._deliveries.append(delivery)
        return delivery

    def by_cell(self, cells: Iterable[Cell]) -> dict[int, Handed]:
        """What the kernel has got from each cell, by the cell's index.

        A cell brought what any of its executions brought: what a failed one has not brought is
        there from the one before it.
        """
        handed: dict[int, Handed] = {}
        for cell in cells:
            own = [each for each in self._deliveries if each.number in cell.executions]
            if own:
                got = Handed(tuple(_latest(run for each in own if (run := each.handed()))))
                absent = dict(own[-1].absent())
                handed[cell.index] = replace(
                    got, absent={name: absent[name] for name in absent if name not in got.names}
                )
        return handed


def _latest(runs: Iterable[HandedRun]) -> list[HandedRun]:
    """The runs without names that a later one has bound anew, and without those of no use."""
    kept: list[HandedRun] = []
    bound: set[str] = set()
    for run in reversed(list(runs)):
        names = tuple(name for name in run.names if name not in bound)
        out = run.out if run.out not in bound else None
        if names or out is not None or not kept:
            kept.append(replace(run, names=names, out=out, handle=run.handle and out is not None))
        bound |= {*run.names, *([run.out] if run.out else [])}
    return kept[::-1]
