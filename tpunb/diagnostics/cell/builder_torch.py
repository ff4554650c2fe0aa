"""Turns the records of a cell without torch_xla into findings."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tpunb.backends.torch.compilations import RESUMED, CompiledFrame, GraphBreak
from tpunb.diagnostics.cell.builder import (
    Reason,
    ReportBuilder,
    steps_text,
    times,
    without_followers,
)
from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.gradients import FiniteCheck, Gradients
from tpunb.diagnostics.cell.places import Places
from tpunb.diagnostics.cell.recorder import Compilation
from tpunb.diagnostics.cell.recorder_torch import TorchRecorder
from tpunb.diagnostics.cell.report import Issue, describe_seconds
from tpunb.diagnostics.cell.updates import Updates
from tpunb.utils.text import excerpt

_ONE_SHAPE = (
    "call it with the same shapes, dtypes and numbers in every step: pad to one shape; "
    "`torch._dynamo.mark_dynamic(x, dim)` for a dimension that varies; a tensor for a number that "
    "changes"
)
_MOVE_OUT = (
    "move what torch.compile cannot trace (`.item()`, `print`, a condition on values) out of the "
    "compiled function, or use `torch.where`"
)
_LONGEST = 120
"""Characters of a reason that torch gives."""


class TorchReportBuilder(ReportBuilder):
    """The report on TorchTPU (`on_tpu`), or on torch with a GPU or the CPU."""

    _recorder: TorchRecorder
    reduce = "DistributedDataParallel, or `dist.all_reduce` for each gradient"

    def __init__(
        self,
        recorder: TorchRecorder,
        gradients: Gradients,
        places: Places,
        finite: FiniteCheck | None,
        updates: Updates,
        on_tpu: bool,
    ) -> None:
        super().__init__(recorder, gradients, places, finite)
        self._updates = updates
        self._on_tpu = on_tpu
        self.device_name = "the TPU" if on_tpu else "the GPU"
        self.move = f'model.to("{"tpu" if on_tpu else "cuda"}")'

    def _is_worth_it(self) -> bool:
        return super()._is_worth_it() or bool(self._recorder.started)

    def _findings(self) -> Iterable[Issue]:
        return [
            *self._not_finite(),
            *self._devices(),
            *self._gradient(),
            *self._piling_up(),
            *self._still(),
            *self._left_out(),
            *self._lacking(),
            *self._unreduced(),
            *self._recompiled_functions(),
            *self._broken_graphs(),
            *self._given_up(),
            *self._reads(),
            *self._new_shapes(),
        ]

    def _facts(self) -> list[str]:
        recorder = self._recorder
        facts = [self._where(), *self._pace()]
        if recorder.compile.frames:
            count = len(recorder.compile.frames)
            seconds = sum(frame.seconds for frame in recorder.compile.frames)
            facts.append(
                f"{count} graph{'s' if count > 1 else ''} compiled in {describe_seconds(seconds)}"
            )
        if self._on_tpu and recorder.programs:
            facts.append(f"{recorder.programs} operations outside of torch.compile, by shape")
        return facts

    def _where(self) -> str:
        """'TorchTPU, rehearsed on the CPU'."""
        if self._on_tpu:
            rehearsal: Any = sys.modules.get("tpunb.backends.torchtpu.rehearsal.rehearsed_device")
            rehearsed = rehearsal is not None and rehearsal.is_installed()
            return "TorchTPU, rehearsed on the CPU" if rehearsed else "TorchTPU"
        if self._recorder.used_device:
            return "torch on the GPU"
        return "torch on the CPU, where reading values costs nothing"

    # -- torch.compile

    def _recompiled_functions(self) -> Iterator[Issue]:
        again: dict[tuple[str, int], list[CompiledFrame]] = {}
        for frame in self._recorder.compile.frames:
            if self._is_again(frame):
                again.setdefault((frame.file, frame.line), []).append(frame)
        limits = {(frame.file, frame.line) for frame in self._recorder.compile.at_limit}
        for key, found in again.items():
            reasons = list(dict.fromkeys(self._reason(frame.reason) for frame in found))
            more = f" (and {len(reasons) - 1} more reasons)" if len(reasons) > 1 else ""
            started = [self._recorder.started[frame.number] for frame in found]
            when = (
                steps_text([start.step for start in started])
                if self._recorder.steps
                else (times(len(found)))
            )
            at = "at " if self._recorder.steps else ""
            seconds = sum(frame.seconds for frame in found)
            end = (
                "; the limit is reached, so torch compiles no further variant and runs them "
                "without being compiled" * (key in limits)
            )
            yield Issue(
                "recompiled",
                f"torch.compile recompiled {self._function(found[0])}{at}{when} "
                f"({describe_seconds(seconds)}): {reasons[0]}{more}{end}",
                self._at(started[0].place),
                _ONE_SHAPE,
                seconds,
            )

    def _is_again(self, frame: CompiledFrame) -> bool:
        """True if a loop's line has led to a further compilation of a function.

        The rest of a function behind a graph break is compiled again together with it.
        """
        if frame.number < 0 or not frame.reason or frame.function.startswith(RESUMED):
            return False
        if self._recorder.steps:
            return self._recorder.started[frame.number].again
        place = self._started_at(frame.number)
        return any(
            (other.file, other.line) == (frame.file, frame.line)
            and other.number < frame.number
            and self._started_at(other.number) == place
            for other in self._recorder.compile.frames
        )

    def _function(self, frame: CompiledFrame) -> str:
        """The name of a function of the notebook; others are known by the line that calls them."""
        return f"`{frame.function}` " if frame.file in self._places.files else ""

    def _reason(self, text: str) -> str:
        """A reason of torch without the number of the compilation before it, and its source."""
        number, colon, reason = text.partition(": ")
        what = reason if colon and "/" in number and " " not in number else text
        return excerpt(what.partition("\n")[0].partition("  #")[0].strip(), _LONGEST)

    def _broken_graphs(self) -> Iterator[Issue]:
        groups: dict[tuple[SourceLine | None, str], list[GraphBreak]] = {}
        for found in self._recorder.compile.breaks:
            key = self._line_of(found), self._reason(found.reason)
            groups.setdefault(key, []).append(found)
        for (place, reason), breaks in groups.items():
            often = f", {times(len(breaks))}" if len(breaks) > 1 else ""
            yield Issue(
                "break",
                f"torch.compile breaks the graph here{often}: {reason}",
                self._at(place),
                _MOVE_OUT,
            )

    def _line_of(self, found: GraphBreak) -> SourceLine | None:
        inside = [SourceLine(*line) for line in found.lines if line[0] in self._places.files]
        return inside[-1] if inside else self._started_at(found.number - 1)

    def _started_at(self, number: int) -> SourceLine | None:
        started = self._recorder.started
        return started[number].place if 0 <= number < len(started) else None

    def _given_up(self) -> Iterator[Issue]:
        told: set[tuple[str, int]] = set()
        for frame in self._recorder.compile.frames:
            if not frame.given_up or (frame.file, frame.line) in told:
                continue
            told.add((frame.file, frame.line))
            inside = frame.file in self._places.files and frame.given_up_line
            place = SourceLine(frame.file, frame.given_up_line) if inside else None
            yield Issue(
                "break",
                f"torch.compile does not compile `{frame.function}`: "
                f"{self._reason(frame.given_up)}",
                self._at(place or self._started_at(frame.number)),
                _MOVE_OUT,
            )

    # -- operations outside of torch.compile

    def _new_shapes(self) -> Iterator[Issue]:
        if not self._on_tpu:  # on a GPU or the CPU, a new shape costs nothing
            return
        groups: dict[Reason, list[Compilation]] = {}
        for program in self._recorder.compilations:
            reason = Reason(program.cause.kind, program.cause.place, program.cause.op)
            groups.setdefault(reason, []).append(program)
        for reason, programs in without_followers(groups).items():
            steps = steps_text([program.step for program in programs])
            operations = sum(program.size for program in programs)
            count = f"{operations} operation{'s' if operations > 1 else ''}"
            what, fix, at = self._why(programs[0].cause, programs[0], reason.place)
            yield Issue("recompiled", f"recompiled at {steps} ({count}): {what}", self._at(at), fix)

    def _lacking(self) -> Iterator[Issue]:
        for gap in self._recorder.gaps.values():
            yield Issue(
                "gap",
                f"{gap.name.strip('_')}() {gap.problem}",
                self._at(gap.place),
                gap.instead,
                math.inf,
            )

    # -- optimizers

    def _piling_up(self) -> Iterator[Issue]:
        for key, stepped in self._gradients.optimizers.items():
            kept = self._updates.kept.get(key, 0)
            if stepped.steps >= 3 and kept == stepped.steps - 1:
                yield Issue(
                    "zero_grad",
                    "gradients are never set to zero: each step adds to those of all steps before",
                    self._at(stepped.place),
                    "call `optimizer.zero_grad()` in each step",
                    math.inf,
                )

    def _still(self) -> Iterator[Issue]:
        for stepped in self._gradients.optimizers.values():
            rate = stepped.optimizer.param_groups[0].get("lr")
            for still in self._updates.still(stepped):
                names = self._names(still.parameters)
                dtype = str(still.parameters[0].dtype).removeprefix("torch.")
                if still.half:
                    title = f"a step changes {still.share:.0%} of the values of {names} ({dtype})"
                    fix = (
                        f"keep the weights in float32, and compute with `torch.autocast"
                        f'("{"tpu" if self._on_tpu else "cpu"}", dtype=torch.bfloat16)`: {dtype} '
                        "loses changes that are small beside the value"
                    )
                else:
                    title = f"no step changes the values of {names}"
                    fix = f"check the learning rate, which is {rate} in the last step"
                yield Issue("unchanged", title, self._at(stepped.place), fix, math.inf)

    def _left_out(self) -> Iterator[Issue]:
        """Parameters with a gradient that no optimizer changes, of models that have others."""
        trained = {
            id(p) for stats in self._gradients.optimizers.values() for p in stats.parameters()
        }
        for model in self._gradients.models.values():
            own = list(model.parameters())
            if not any(id(p) in trained for p in own):
                continue
            left = [p for p in own if id(p) not in trained and p.grad is not None]
            if left:
                yield Issue(
                    "optimizer",
                    f"in no optimizer, so they stay as they are: {self._names(left)}",
                    self._at(self._busiest().place),
                    "give all of `model.parameters()` to the optimizer, or freeze them with "
                    "`requires_grad_(False)`",
                    math.inf,
                )
