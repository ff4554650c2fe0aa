"""The report of `%%tpu_debug`: the issues of a cell and their fixes, the most expensive first.

`ReportBuilder` turns the records of a cell into findings.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from tpunb.backends.xla import runtime
from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.places import Places

if TYPE_CHECKING:  # they need torch, and %load_ext imports this
    from tpunb.diagnostics.cell.gradients import FiniteCheck, Gradients
    from tpunb.diagnostics.cell.operations import Cause
    from tpunb.diagnostics.cell.recorder import Compilation, LineStats, Recorder

MOST = 7
"""Maximal number of findings shown, which fit on a screen."""
_GOOD, _BAD = "#2da44e", "#e5534b"
_FAINT = "opacity:0.7"
_COMMAND = re.compile("`([^`]+)`")


@dataclass(frozen=True)
class Issue:
    kind: str
    """'recompiled', 'fallback', 'read', 'gradients', 'device', 'reduction', 'nan', 'graph'."""
    title: str
    """The issue and its cost."""
    where: str
    """'cell [3], line 12: loss.item()'; '' without a line."""
    fix: str
    seconds: float = 0.0
    """The time it cost; infinite if it makes results wrong."""


@dataclass(frozen=True)
class DebugReport:
    findings: Sequence[Issue]
    """The most expensive first."""
    facts: Sequence[str]
    """'20 steps of 3.1 ms', '2 graphs compiled in 1.2 s'."""

    def __str__(self) -> str:
        lines = [" · ".join([self._headline(), *self.facts])]
        for number, finding in enumerate(self.findings[:MOST], 1):
            lines.append(f"{number}. {finding.title}")
            lines += [f"   {finding.where}"] if finding.where else []
            lines.append(f"   → {finding.fix}")
        if more := self._more():
            lines.append(more)
        return "\n".join(lines)

    def html(self) -> str:
        """Return the report as HTML, with inline styles, which every front end keeps."""
        head = f"<b>{escape(self._headline())}</b>" + "".join(f" · {escape(f)}" for f in self.facts)
        parts = [f"<div>{head}</div>"]
        for number, finding in enumerate(self.findings[:MOST], 1):
            fix = _COMMAND.sub(r"<code>\1</code>", escape(finding.fix))
            where = ""
            if finding.where:
                place, colon, source = finding.where.partition(": ")
                code = f"<code>{escape(source)}</code>" if colon else ""
                where = f'<br><span style="{_FAINT}">{escape(place)}{colon}</span>{code}'
            parts.append(
                f'<div style="margin:6px 0 0 0">{number}. {escape(finding.title)}{where}'
                f"<br>→ {fix}</div>"
            )
        if more := self._more():
            parts.append(f'<div style="margin:6px 0 0 0;{_FAINT}">{escape(more)}</div>')
        colour = _BAD if self.findings else _GOOD
        return (
            f'<div style="border-left:3px solid {colour};padding:2px 0 2px 8px;margin:2px 0;'
            f'max-width:860px;line-height:1.5;overflow-wrap:anywhere">{"".join(parts)}</div>'
        )

    def bundle(self) -> dict[str, str]:
        """Return the report for IPython's display."""
        return {"text/plain": str(self), "text/html": self.html()}

    def _headline(self) -> str:
        count = len(self.findings)
        if not count:
            return "%%tpu_debug: no issues found"
        return f"%%tpu_debug: {count} issue{'s' if count > 1 else ''} found"

    def _more(self) -> str:
        left = len(self.findings) - MOST
        return f"and {left} less expensive issues: fix the ones above first" if left > 0 else ""


def describe_seconds(seconds: float) -> str:
    """'3.1 ms', '2.4 s', '3 min'."""
    if seconds < 1:
        return f"{seconds * 1e3:.2g} ms" if seconds < 0.01 else f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


_OFTEN = 0.5
"""Share of steps above which reading a value counts as slowing the loop."""
_NAMES = {
    "__bool__": "a condition",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index",
    "__format__": "an f-string",
    "__repr__": "print()",
    "__array__": "numpy",
}


class ReportBuilder:
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
        """Return the report; None for a cell that neither used XLA nor trained."""
        recorder = self._recorder
        if not recorder.used_xla and not self._gradients.optimizers:
            return None
        findings = [
            *self._not_finite(),
            *self._devices(),
            *self._gradient(),
            *self._recompiled(),
            *self._fallbacks(),
            *self._reads(),
            *self._unreduced(),
            *self._endless(),
        ]
        findings.sort(key=lambda finding: -finding.seconds)
        return DebugReport(findings, self._facts())

    @property
    def _steps(self) -> int:
        return self._recorder.optimizer_steps or self._recorder.marks

    def _facts(self) -> list[str]:
        recorder = self._recorder
        facts = []
        if self._steps:
            every = recorder.intervals
            pace = f" of {describe_seconds(statistics.median(every))}" if every else ""
            facts.append(f"{self._steps} step{'s' if self._steps > 1 else ''}{pace}")
        if recorder.compilations:
            count = len(recorder.compilations)
            seconds = sum(program.seconds for program in recorder.compilations)
            facts.append(
                f"{count} graph{'s' if count > 1 else ''} compiled in {describe_seconds(seconds)}"
            )
            facts.append(
                f"the largest has {max(program.size for program in recorder.compilations)} nodes"
            )
        elif recorder.started:
            facts.append("nothing compiled")
        if runtime.is_running() and (memory := runtime.device_memory()):
            used, limit = (size / 2**30 for size in memory)
            facts.append(f"{used:.1f} of {limit:.1f} GiB on the device")
        return facts

    def _at(self, place: SourceLine | None) -> str:
        if place is None:
            return ""
        source = self._places.source(place)
        return f"{self._places.name(place)}: {source}" if source else self._places.name(place)

    # -- programs

    def _recompiled(self) -> Iterator[Issue]:
        groups: dict[_Reason, list[Compilation]] = {}
        for program in [*self._recorder.compilations, *self._recorder.variants]:
            cause = program.cause
            if cause.kind in ("other", "start") or (cause.kind == "hidden" and program.step <= 3):
                continue
            reason = _Reason(cause.kind, cause.place or program.place, cause.op)
            groups.setdefault(reason, []).append(program)
        for reason, programs in _without_followers(groups).items():
            first, cause = programs[0], programs[0].cause
            seconds = sum(program.seconds for program in programs)
            steps = _steps([program.step for program in programs])
            what, fix, at = self._why(cause, first, reason.place)
            cost = describe_seconds(seconds) if seconds else "cached in this kernel, not in a run"
            yield Issue(
                "recompiled",
                f"recompiled at {steps} ({cost}): {what}",
                self._at(at),
                fix,
                seconds,
            )

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
                f"the size of {_called(cause.op)}'s result depends on the data: {cause.now}, "
                f"{cause.before} {since}",
                "keep the shape and mask: `torch.where(mask, x, 0)` instead of `x[mask]`",
                place,
            )
        if cause.kind == "constant":
            return (
                f"{_called(cause.op)} got {cause.now}, {cause.before} {since}: this is a constant "
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
            what = f"{_called(cause.op)} {ran}, unlike {since}"
        return (
            what,
            "do the same operations in every step (`torch.where`, a weight of 0), or accept one "
            "program per branch if there are few",
            decides or place,
        )

    def _endless(self) -> Iterator[Issue]:
        """A training loop without a step marker."""
        recorder = self._recorder
        if recorder.used_xla and recorder.optimizer_steps > 2 and not recorder.marks:
            stepped = max(self._gradients.optimizers.values(), key=lambda stats: stats.steps)
            yield Issue(
                "graph",
                f"{recorder.optimizer_steps} steps without torch_xla.sync(): their operations form "
                "one growing program",
                self._at(stepped.place),
                "call `torch_xla.sync()` after each step",
                math.inf,
            )

    # -- values that leave the device

    def _fallbacks(self) -> Iterator[Issue]:
        for tally in self._recorder.fallbacks.values():
            yield Issue(
                "fallback",
                f"{_called(tally.name)} ran on the CPU, {self._often(tally)} "
                f"({describe_seconds(tally.seconds)}): XLA does not support it, so its inputs are "
                "computed and copied first",
                self._at(tally.place),
                "use operators that XLA supports, or do this outside the loop",
                tally.seconds,
            )

    def _reads(self) -> Iterator[Issue]:
        for tally in self._recorder.reads.values():
            if self._steps < 3 or len(tally.steps) < _OFTEN * self._steps:
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

    def _often(self, tally: LineStats) -> str:
        if self._steps and len(tally.steps) >= _OFTEN * self._steps:
            each = round(tally.count / len(tally.steps))
            return "at every step" if each <= 1 else f"{each} times a step"
        return f"{tally.count} time{'s' if tally.count > 1 else ''}"

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
                    "belong to no model: moving a model to an XLA device creates new parameters"
                )
                fix = "create the optimizer after `model.to(device)`"
            else:
                title = f"on the CPU, not on the XLA device: {names}"
                fix = "call `model.to(torch_xla.device())` before you create the optimizer"
            yield Issue("device", title, self._at(stepped.place), fix, math.inf)

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
                    "use `xm.optimizer_step(optimizer)`, or DistributedDataParallel",
                )

    def _names(self, parameters: Sequence[object], most: int = 3) -> str:
        names = [self._gradients.name(p) for p in parameters]  # type: ignore[arg-type]
        more = f" and {len(names) - most} more" if len(names) > most else ""
        return ", ".join(names[:most]) + more

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


class _Reason(NamedTuple):
    """The reason that several compiled programs have in common."""

    kind: str
    place: SourceLine | None
    op: str


def _without_followers(
    groups: dict[_Reason, list[Compilation]],
) -> dict[_Reason, list[Compilation]]:
    """Merge programs that are new because of the same tensor shape into the first of them."""
    kept: dict[_Reason, list[Compilation]] = {}
    first: dict[tuple[int, ...], _Reason] = {}
    for key, programs in groups.items():
        if key.kind in ("shape", "data"):
            leader = first.setdefault(tuple(sorted({program.step for program in programs})), key)
            if leader != key:
                kept[leader] = [*kept[leader], *programs]
                continue
        kept[key] = programs
    return kept


def _called(name: str) -> str:
    if name.startswith("_") and not name.startswith("__"):
        return "an operation"  # internal to torch, not called by the user
    return {"__getitem__": "an index", "__pow__": "a power"}.get(name, f"{name.strip('_')}()")


def _steps(steps: Sequence[int], most: int = 4) -> str:
    distinct = sorted(set(steps))
    shown = ", ".join(map(str, distinct[:most])) + (", …" if len(distinct) > most else "")
    times = f", {len(steps)} times" if len(steps) > 1 else ""
    return f"step{'s' if len(distinct) > 1 else ''} {shown}{times}"
