"""Records and reports a cell without torch_xla: TorchTPU, or torch on a GPU or the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpunb.diagnostics.cell import frames
from tpunb.diagnostics.cell.builder_torch import TorchReportBuilder
from tpunb.diagnostics.cell.gradients import FiniteCheck, Gradients
from tpunb.diagnostics.cell.places import Places
from tpunb.diagnostics.cell.recorder_torch import TorchRecorder
from tpunb.diagnostics.cell.report import DebugReport
from tpunb.diagnostics.cell.updates import Updates


class _TorchGradients(Gradients):
    """Knows what reduces gradients: collectives of torch.distributed."""

    _recorder: TorchRecorder
    on_tpu = False
    _distributed = False

    def is_reduced(self) -> bool:
        dist: Any = sys.modules.get("torch.distributed")
        initialized = dist is not None and dist.is_available() and dist.is_initialized()
        self._distributed = self._distributed or initialized
        return self._recorder.reduced or not frames.optimizer_called_by(self._files)

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        if self.on_tpu:
            return parameter.device.type != "tpu"
        return self._recorder.used_device and parameter.device.type == "cpu"

    def reduces_by_itself(self) -> bool:
        """Also if the notebook does not use torch.distributed at all: it is for one device."""
        return not self._distributed or super().reduces_by_itself()


def watch(
    places: Places,
    namespace: Mapping[str, Any],
    stack: contextlib.ExitStack,
    *,
    on_tpu: bool,
    steps: int | None,
    nan: bool,
) -> Callable[[], DebugReport | None]:
    """Begin to record; returns a function that makes the report.

    `stack` ends the recording. `on_tpu`: the cell is written for TorchTPU.
    """
    recorder = TorchRecorder(places.files, steps, on_tpu=on_tpu)
    gradients = _TorchGradients(recorder, places.files, namespace)
    gradients.on_tpu = on_tpu
    updates = Updates(recorder)
    gradients.checks.append(updates)
    stack.enter_context(recorder.watching())
    stack.enter_context(gradients.watching())
    finite = FiniteCheck(recorder, gradients) if nan else None
    if finite is not None:
        stack.enter_context(finite.watching())
    return TorchReportBuilder(recorder, gradients, places, finite, updates, on_tpu).report
