"""Turns the records of a cell that uses torch_xla into findings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from tpunb.backends.xla import runtime
from tpunb.diagnostics.cell.builder import (
    Reason,
    ReportBuilder,
    called,
    steps_text,
    without_followers,
)
from tpunb.diagnostics.cell.recorder import Compilation
from tpunb.diagnostics.cell.recorder_xla import XlaRecorder
from tpunb.diagnostics.cell.report import Issue, describe_seconds


class XlaReportBuilder(ReportBuilder):
    """The report on torch_xla."""

    _recorder: XlaRecorder
    device_name = "the XLA device"
    new_device = "an XLA device"
    move = "model.to(torch_xla.device())"
    reduce = "`xm.optimizer_step(optimizer)`, or DistributedDataParallel"

    def _findings(self) -> Iterable[Issue]:
        return [
            *self._not_finite(),
            *self._devices(),
            *self._gradient(),
            *self._recompiled(),
            *self._fallbacks(),
            *self._reads(),
            *self._unreduced(),
            *self._endless(),
        ]

    def _facts(self) -> list[str]:
        recorder = self._recorder
        facts = self._pace()
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

    def _recompiled(self) -> Iterator[Issue]:
        groups: dict[Reason, list[Compilation]] = {}
        for program in [*self._recorder.compilations, *self._recorder.variants]:
            cause = program.cause
            if cause.kind in ("other", "start") or (cause.kind == "hidden" and program.step <= 3):
                continue
            reason = Reason(cause.kind, cause.place or program.place, cause.op)
            groups.setdefault(reason, []).append(program)
        for reason, programs in without_followers(groups).items():
            first, cause = programs[0], programs[0].cause
            seconds = sum(program.seconds for program in programs)
            steps = steps_text([program.step for program in programs])
            what, fix, at = self._why(cause, first, reason.place)
            cost = describe_seconds(seconds) if seconds else "cached in this kernel, not in a run"
            yield Issue(
                "recompiled",
                f"recompiled at {steps} ({cost}): {what}",
                self._at(at),
                fix,
                seconds,
            )

    def _endless(self) -> Iterator[Issue]:
        """A training loop without a step marker."""
        recorder = self._recorder
        if recorder.used_device and recorder.optimizer_steps > 2 and not recorder.marks:
            yield Issue(
                "graph",
                f"{recorder.optimizer_steps} steps without torch_xla.sync(): their operations form "
                "one growing program",
                self._at(self._busiest().place),
                "call `torch_xla.sync()` after each step",
                math.inf,
            )

    def _fallbacks(self) -> Iterator[Issue]:
        for tally in self._recorder.fallbacks.values():
            yield Issue(
                "fallback",
                f"{called(tally.name)} ran on the CPU, {self._often(tally)} "
                f"({describe_seconds(tally.seconds)}): XLA does not support it, so its inputs are "
                "computed and copied first",
                self._at(tally.place),
                "use operators that XLA supports, or do this outside the loop",
                tally.seconds,
            )
