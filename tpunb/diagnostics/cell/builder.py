"""Turns the records of a cell into findings: what all backends have in common."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.gradients import FiniteCheck, Gradients, OptimizerStats
from tpunb.diagnostics.cell.operations import Cause
from tpunb.diagnostics.cell.places import Places
from tpunb.diagnostics.cell.recorder import Compilation, LineStats, Recorder
from tpunb.diagnostics.cell.report import DebugReport, Issue, describe_seconds

OFTEN = 0.5
"""Share of steps above which reading a value counts as slowing the loop."""
_NAMES = {
    "__bool__": "a condition",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index",
    "__format__": "an f-string",
    "__repr__": "print()",
    "__array__": "numpy",
    "__contains__": "`in`",
    "": "this line",
}


class ReportBuilder(ABC):
    """Makes the report from what was recorded; subclasses are those of the backends."""

    device_name: str
    """'the XLA device'."""
    move: str
    """Code that moves a model there."""
    reduce: str
    """How gradients are reduced, for the fix."""

    def __init__(
        self,
        recorder: Recorder,
        gradients: Gradients,
        places: Places,
        finite: FiniteCheck | None = None,
    ) -> None:
        self._recorder = recorder
        self._gradients = gradients
        self._places = places
        self._finite = finite

    def report(self) -> DebugReport | None:
        """Return the report; None for a cell that neither used the device nor trained."""
        if not self._is_worth_it():
            return None
        findings = sorted(self._findings(), key=lambda finding: -finding.seconds)
        return DebugReport(findings, self._facts())

    def _is_worth_it(self) -> bool:
        return self._recorder.used_device or bool(self._gradients.optimizers)

    @abstractmethod
    def _findings(self) -> Iterable[Issue]: ...

    @abstractmethod
    def _facts(self) -> list[str]: ...

    def _pace(self) -> list[str]:
        steps, every = self._recorder.steps, self._recorder.intervals
        if not steps:
            return []
        pace = f" of {describe_seconds(statistics.median(every))}" if every else ""
        return [f"{steps} step{'s' if steps > 1 else ''}{pace}"]

    def _at(self, place: SourceLine | None) -> str:
        if place is None:
            return ""
        source = self._places.source(place)
        return f"{self._places.name(place)}: {source}" if source else self._places.name(place)

    # -- new shapes and other differences

    def _why(
        self, cause: Cause, program: Compilation, place: SourceLine | None
    ) -> tuple[str, str, SourceLine | None]:
        last = f"step {program.since}" if program.since != program.step else "earlier in this step"
        since = f"at {last}" if program.since != program.step else last
        if cause.kind == "shape" and cause.rows is not None:
            now, before = cause.rows
            return (
                f"{now} rows, {before} {since} ({cause.now})",
                "give every batch the same number of rows: `DataLoader(…, drop_last=True)`, or "
                "`tpunb.training.shard(loader)`, which pads the last batch and marks the real rows",
                place,
            )
        if cause.kind == "shape":
            return (
                f"{cause.now}, {cause.before} {since}",
                "pad to one length or to a few, and mask the padding: `pad_sequences` and "
                "`masked_loss` of tpunb.training",
                place,
            )
        if cause.kind == "dtype":
            return f"{cause.now}, {cause.before} {since}", "convert it to one dtype", place
        if cause.kind == "data":
            return (
                f"the size of {called(cause.op)}'s result depends on the data: {cause.now}, "
                f"{cause.before} {since}",
                "keep the shape and mask: `torch.where(mask, x, 0)` instead of `x[mask]`",
                place,
            )
        if cause.kind == "constant":
            return (
                f"{called(cause.op)} got {cause.now}, {cause.before} {since}: this is a constant "
                "of the program",
                "pass the same number in every step, or a tensor on the device "
                "(`index_select` for an index, a mask for a length)",
                place,
            )
        if cause.kind == "branch":
            return self._branch(cause, since, place)
        return (
            f"no operation differs from {last}; other tensors were alive when the step ended",
            "keep the same tensors in every step: a loss that only some steps add to a list is one "
            "more result of the program (use `loss.detach().clone()` after the sync)",
            place,
        )

    def _branch(
        self, cause: Cause, since: str, place: SourceLine | None
    ) -> tuple[str, str, SourceLine | None]:
        decides = self._places.branch(place) if place is not None else None
        ran = "did not run" if cause.skipped else "ran"
        if place is not None and decides is not None and decides.line != place.line:
            what = f"line {place.line} {ran}, unlike {since}"
        else:
            what = f"{called(cause.op)} {ran}, unlike {since}"
        return (
            what,
            "do the same operations in every step (`torch.where`, a weight of 0), or accept one "
            "program per branch if there are few",
            decides or place,
        )

    # -- values that leave the device

    def _reads(self) -> Iterator[Issue]:
        for tally in self._recorder.reads.values():
            if not self._is_frequent(tally):
                continue
            name = _NAMES.get(tally.name, f".{tally.name}()")
            yield Issue(
                "read",
                f"{name} reads a value from the device, {self._often(tally)}: the loop waited "
                f"{describe_seconds(tally.seconds)} for it",
                self._at(tally.place),
                "keep it on the device: `tpunb.log(step, loss=loss)` reads it later without "
                "waiting; or read it only every 100 steps",
                tally.seconds,
            )

    def _is_frequent(self, tally: LineStats) -> bool:
        steps = self._recorder.steps
        return steps >= 3 and len(tally.steps) >= OFTEN * steps

    def _often(self, tally: LineStats) -> str:
        steps = self._recorder.steps
        if steps and len(tally.steps) >= OFTEN * steps:
            each = round(tally.count / len(tally.steps))
            return "at every step" if each <= 1 else f"{each} times a step"
        return times(tally.count)

    # -- gradients and devices

    def _devices(self) -> Iterator[Issue]:
        for stepped in self._gradients.optimizers.values():
            if not stepped.elsewhere:
                continue
            names = self._names(stepped.elsewhere)
            known = {id(p) for model in self._gradients.models.values() for p in model.parameters()}
            stale = known and not any(id(p) in known for p in stepped.elsewhere)
            if stale:
                title = (
                    f"the optimizer changes {len(stepped.elsewhere)} parameters on the CPU that "
                    f"belong to no model: moving a model to {self.new_device} creates new "
                    "parameters"
                )
                fix = "create the optimizer after `model.to(device)`"
            else:
                title = f"on the CPU, not on {self.device_name}: {names}"
                fix = f"call `{self.move}` before you create the optimizer"
            yield Issue("device", title, self._at(stepped.place), fix, math.inf)

    @property
    def new_device(self) -> str:
        """'an XLA device'."""
        return self.device_name

    def _gradient(self) -> Iterator[Issue]:
        for stepped in self._gradients.optimizers.values():
            away = {id(p) for p in stepped.elsewhere}
            missing = [p for key, p in (stepped.without or {}).items() if key not in away]
            if missing:
                yield Issue(
                    "gradients",
                    f"no gradient at any step: {self._names(missing)}",
                    self._at(stepped.place),
                    "the loss does not depend on them (or `.detach()`, `.data`, `.item()` cut the "
                    "graph): use them, or remove them from the optimizer",
                    math.inf,
                )

    def _unreduced(self) -> Iterator[Issue]:
        if self._gradients.reduces_by_itself():
            return
        for stepped in self._gradients.optimizers.values():
            if not stepped.reduced and not stepped.elsewhere:
                yield Issue(
                    "reduction",
                    "gradients are not reduced before this step: on several cores each core would "
                    "train a separate model",
                    self._at(stepped.place),
                    f"use {self.reduce}",
                )

    def _names(self, parameters: Sequence[object], most: int = 3) -> str:
        names = [self._gradients.name(p) for p in parameters]  # type: ignore[arg-type]
        more = f" and {len(names) - most} more" if len(names) > most else ""
        return ", ".join(names[:most]) + more

    def _busiest(self) -> OptimizerStats:
        """The optimizer with the most steps."""
        return max(self._gradients.optimizers.values(), key=lambda stats: stats.steps)

    def _not_finite(self) -> Iterator[Issue]:
        first = self._finite.first if self._finite is not None else None
        if first is not None:
            yield Issue(
                "nan",
                f"NaN or infinity at step {first.step}, first in {first.what}",
                self._at(first.place),
                "check its inputs: a logarithm of 0, a division by 0, exp of a large number, or a "
                "learning rate that is too high",
                math.inf,
            )


class Reason(NamedTuple):
    """The reason that several compiled programs have in common."""

    kind: str
    place: SourceLine | None
    op: str


def without_followers(
    groups: dict[Reason, list[Compilation]],
) -> dict[Reason, list[Compilation]]:
    """Merge programs that are new because of the same tensor shape into the first of them."""
    kept: dict[Reason, list[Compilation]] = {}
    first: dict[tuple[int, ...], Reason] = {}
    for key, programs in groups.items():
        if key.kind in ("shape", "data"):
            leader = first.setdefault(tuple(sorted({program.step for program in programs})), key)
            if leader != key:
                kept[leader] = [*kept[leader], *programs]
                continue
        kept[key] = programs
    return kept


def called(name: str) -> str:
    """'relu()', 'an index', 'a power'; 'an operation' for what is internal to torch."""
    if name.startswith("_") and not name.startswith("__"):
        return "an operation"  # not called by the user
    names = {"__getitem__": "an index", "index": "an index", "__pow__": "a power", "pow": "a power"}
    return names.get(name, f"{name.strip('_')}()")


def steps_text(steps: Sequence[int], most: int = 4) -> str:
    """'step 3', 'steps 3, 6, 9, 12, …, 20 times'."""
    distinct = sorted(set(steps))
    shown = ", ".join(map(str, distinct[:most])) + (", …" if len(distinct) > most else "")
    often = f", {len(steps)} times" if len(steps) > 1 else ""
    return f"step{'s' if len(distinct) > 1 else ''} {shown}{often}"


def times(count: int) -> str:
    """'1 time', '5 times'."""
    return f"{count} time{'s' if count > 1 else ''}"
