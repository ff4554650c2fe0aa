"""From what was noted of a cell to what a person should mend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tpunb.debug import xla
from tpunb.debug.causes import Cause
from tpunb.debug.finite import Finite
from tpunb.debug.gradients import Gradients
from tpunb.debug.place import Place
from tpunb.debug.places import Places
from tpunb.debug.recorder import Compiled, Recorder, Tally
from tpunb.debug.report import Finding, Report, span

_OFTEN = 0.5
"""The share of steps from which on a read value slows the loop."""
_NAMES = {
    "__bool__": "a condition",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index",
    "__format__": "an f-string",
    "__repr__": "print()",
    "__array__": "numpy",
}


class Findings:
    """What one cell's notes mean."""

    def __init__(
        self,
        recorder: Recorder,
        gradients: Gradients,
        places: Places,
        finite: Finite | None = None,
    ) -> None:
        self._recorder = recorder
        self._gradients = gradients
        self._places = places
        self._finite = finite

    def report(self) -> Report | None:
        """None for a cell that did nothing with XLA, nor train."""
        recorder = self._recorder
        if not recorder.used_xla and not self._gradients.seen:
            return None
        found = [
            *self._not_finite(),
            *self._devices(),
            *self._gradient(),
            *self._recompiled(),
            *self._fallbacks(),
            *self._reads(),
            *self._unreduced(),
            *self._endless(),
        ]
        found.sort(key=lambda one: -one.seconds)
        return Report(found, self._facts())

    @property
    def _steps(self) -> int:
        return self._recorder.optimizer_steps or self._recorder.marks

    def _facts(self) -> list[str]:
        recorder = self._recorder
        facts = []
        if self._steps:
            every = recorder.intervals
            pace = f" of {span(statistics.median(every))}" if every else ""
            facts.append(f"{self._steps} step{'s' if self._steps > 1 else ''}{pace}")
        if recorder.compilations:
            count = len(recorder.compilations)
            seconds = sum(one.seconds for one in recorder.compilations)
            facts.append(f"{count} graph{'s' if count > 1 else ''} compiled in {span(seconds)}")
            facts.append(f"the largest has {max(one.size for one in recorder.compilations)} nodes")
        elif recorder.started:
            facts.append("nothing compiled")
        if xla.running() and (memory := xla.memory()):
            used, limit = (size / 2**30 for size in memory)
            facts.append(f"{used:.1f} of {limit:.1f} GiB on the device")
        return facts

    def _at(self, place: Place | None) -> str:
        if place is None:
            return ""
        source = self._places.source(place)
        return f"{self._places.name(place)}: {source}" if source else self._places.name(place)

    # -- programs

    def _recompiled(self) -> Iterator[Finding]:
        groups: dict[_Reason, list[Compiled]] = {}
        for one in [*self._recorder.compilations, *self._recorder.variants]:
            cause = one.cause
            if cause.kind in ("other", "start") or (cause.kind == "hidden" and one.step <= 3):
                continue
            reason = _Reason(cause.kind, cause.place or one.place, cause.op)
            groups.setdefault(reason, []).append(one)
        for reason, all_of in _without_followers(groups).items():
            first, cause = all_of[0], all_of[0].cause
            seconds = sum(one.seconds for one in all_of)
            steps = _steps([one.step for one in all_of])
            what, fix, at = self._why(cause, first, reason.place)
            cost = span(seconds) if seconds else "this kernel had it, a run compiles it"
            yield Finding(
                "recompiled",
                f"recompiled at {steps} ({cost}): {what}",
                self._at(at),
                fix,
                seconds,
            )

    def _why(
        self, cause: Cause, one: Compiled, place: Place | None
    ) -> tuple[str, str, Place | None]:
        since = f"at step {one.since}" if one.since != one.step else "earlier in this step"
        if cause.kind == "shape" and cause.rows is not None:
            now, before = cause.rows
            return (
                f"{now} rows, {before} {since} ({cause.now})",
                "give every batch the same number of rows: `DataLoader(…, drop_last=True)`, or "
                "`tpunb.training.shard(loader)`, which pads the last one and says what counts",
                place,
            )
        if cause.kind == "shape":
            return (
                f"{cause.now}, {cause.before} {since}",
                "pad to one length or to a few, and mask what was added: `pad_sequences` and "
                "`masked_loss` of tpunb.training",
                place,
            )
        if cause.kind == "dtype":
            return f"{cause.now}, {cause.before} {since}", "convert it to one dtype", place
        if cause.kind == "data":
            return (
                f"the size of {_called(cause.op)}'s result depends on the data: {cause.now}, "
                f"{cause.before} {since}",
                "keep the shape and mask: `torch.where(mask, x, 0)` instead of `x[mask]`",
                place,
            )
        if cause.kind == "constant":
            return (
                f"{_called(cause.op)} was given {cause.now}, {cause.before} {since}: it is a "
                "constant of the program",
                "give it the same number at every step, or a tensor on the device "
                "(`index_select` for an index, a mask for a length)",
                place,
            )
        if cause.kind == "branch":
            return self._branch(cause, since, place)
        return (
            f"no operation differs from {since.removeprefix('at ')}; other tensors were alive when "
            "the step ended",
            "keep the same tensors at every step: a loss that is put into a list at some steps "
            "only becomes one more result of the program (`loss.detach().clone()` after the sync)",
            place,
        )

    def _branch(
        self, cause: Cause, since: str, place: Place | None
    ) -> tuple[str, str, Place | None]:
        decides = self._places.branch(place) if place is not None else None
        ran = "did not run" if cause.skipped else "ran"
        if place is not None and decides is not None and decides.line != place.line:
            what = f"line {place.line} {ran}, other than {since}"
        else:
            what = f"{_called(cause.op)} {ran}, other than {since}"
        return (
            what,
            "do the same operations at every step (`torch.where`, a weight of 0), or accept one "
            "program for each way if there are few",
            decides or place,
        )

    def _endless(self) -> Iterator[Finding]:
        """A training loop without a step marker."""
        recorder = self._recorder
        if recorder.used_xla and recorder.optimizer_steps > 2 and not recorder.marks:
            stepped = max(self._gradients.seen.values(), key=lambda one: one.steps)
            yield Finding(
                "graph",
                f"{recorder.optimizer_steps} steps without torch_xla.sync(): their operations "
                "become one growing program",
                self._at(stepped.place),
                "call `torch_xla.sync()` after each step",
                math.inf,
            )

    # -- values that leave the device

    def _fallbacks(self) -> Iterator[Finding]:
        for tally in self._recorder.fallbacks.values():
            yield Finding(
                "fallback",
                f"{_called(tally.name)} ran on the CPU, {self._often(tally)} "
                f"({span(tally.seconds)}): XLA has no such operator, so all that leads to it is "
                "computed and copied first",
                self._at(tally.place),
                "use operators that XLA has, or do this outside the loop",
                tally.seconds,
            )

    def _reads(self) -> Iterator[Finding]:
        for tally in self._recorder.reads.values():
            if self._steps < 3 or len(tally.steps) < _OFTEN * self._steps:
                continue
            name = _NAMES.get(tally.name, f".{tally.name}()")
            yield Finding(
                "read",
                f"{name} reads a value from the device, {self._often(tally)}: the loop waited "
                f"{span(tally.seconds)} for it",
                self._at(tally.place),
                "keep it on the device: `tpunb.log(step, loss=loss)` reads it later without "
                "waiting; or read it every 100 steps",
                tally.seconds,
            )

    def _often(self, tally: Tally) -> str:
        if self._steps and len(tally.steps) >= _OFTEN * self._steps:
            each = round(tally.count / len(tally.steps))
            return "at every step" if each <= 1 else f"{each} times a step"
        return f"{tally.count} time{'s' if tally.count > 1 else ''}"

    # -- gradients and devices

    def _devices(self) -> Iterator[Finding]:
        for stepped in self._gradients.seen.values():
            if not stepped.elsewhere:
                continue
            names = self._names(stepped.elsewhere)
            known = {id(p) for model in self._gradients.models.values() for p in model.parameters()}
            stale = known and not any(id(p) in known for p in stepped.elsewhere)
            if stale:
                title = (
                    f"the optimizer changes {len(stepped.elsewhere)} parameters on the CPU that no "
                    "model has: moving a model to an XLA device makes new ones"
                )
                fix = "make the optimizer after `model.to(device)`"
            else:
                title = f"on the CPU, not on the XLA device: {names}"
                fix = "move the model before the optimizer is made: `model.to(torch_xla.device())`"
            yield Finding("device", title, self._at(stepped.place), fix, math.inf)

    def _gradient(self) -> Iterator[Finding]:
        for stepped in self._gradients.seen.values():
            away = {id(p) for p in stepped.elsewhere}
            missing = [p for key, p in (stepped.without or {}).items() if key not in away]
            if missing:
                yield Finding(
                    "gradients",
                    f"no gradient at any step: {self._names(missing)}",
                    self._at(stepped.place),
                    "the loss does not depend on them (or `.detach()`, `.data`, `.item()` cut them "
                    "off): use them, or leave them out of the optimizer",
                    math.inf,
                )

    def _unreduced(self) -> Iterator[Finding]:
        if self._gradients.reduces_by_itself():
            return
        for stepped in self._gradients.seen.values():
            if not stepped.reduced and not stepped.elsewhere:
                yield Finding(
                    "reduction",
                    "gradients are not reduced before this step: on several cores each would "
                    "train a model of its own",
                    self._at(stepped.place),
                    "`xm.optimizer_step(optimizer)`, or DistributedDataParallel",
                )

    def _names(self, parameters: Sequence[object], most: int = 3) -> str:
        names = [self._gradients.name(p) for p in parameters]  # type: ignore[arg-type]
        more = f" and {len(names) - most} more" if len(names) > most else ""
        return ", ".join(names[:most]) + more

    def _not_finite(self) -> Iterator[Finding]:
        first = self._finite.first if self._finite is not None else None
        if first is not None:
            yield Finding(
                "nan",
                f"NaN or infinity at step {first.step}, first in {first.what}",
                self._at(first.place),
                "look at what goes in there: a logarithm or division of 0, exp of a large number, "
                "or a learning rate that is too high",
                math.inf,
            )


class _Reason(NamedTuple):
    """What programs have in common that were compiled for one reason."""

    kind: str
    place: Place | None
    op: str


def _without_followers(groups: dict[_Reason, list[Compiled]]) -> dict[_Reason, list[Compiled]]:
    """Programs of other lines that the same tensor's shape made new count with the first."""
    kept: dict[_Reason, list[Compiled]] = {}
    first: dict[tuple[int, ...], _Reason] = {}
    for key, all_of in groups.items():
        if key.kind in ("shape", "data"):
            leader = first.setdefault(tuple(sorted({one.step for one in all_of})), key)
            if leader != key:
                kept[leader] = [*kept[leader], *all_of]
                continue
        kept[key] = all_of
    return kept


def _called(name: str) -> str:
    return {"__getitem__": "an index", "__pow__": "a power"}.get(name, f"{name.strip('_')}()")


def _steps(steps: Sequence[int], most: int = 4) -> str:
    distinct = sorted(set(steps))
    shown = ", ".join(map(str, distinct[:most])) + (", …" if len(distinct) > most else "")
    times = f", {len(steps)} times" if len(steps) > 1 else ""
    return f"step{'s' if len(distinct) > 1 else ''} {shown}{times}"
