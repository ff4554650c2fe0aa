"""Records and reports a cell that uses torch_xla."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tpunb.backends.xla import private_names, runtime
from tpunb.diagnostics.cell import frames
from tpunb.diagnostics.cell.builder_xla import XlaReportBuilder
from tpunb.diagnostics.cell.gradients import FiniteCheck, Gradients
from tpunb.diagnostics.cell.places import Places
from tpunb.diagnostics.cell.recorder_xla import XlaRecorder
from tpunb.diagnostics.cell.report import DebugReport
from tpunb.utils.patching import Replacements


class _XlaGradients(Gradients):
    """Knows what reduces gradients: xm.reduce_gradients, xm.all_reduce, and SPMD."""

    _reduced = False

    def is_reduced(self) -> bool:
        reduced, self._reduced = self._reduced, False
        return reduced or not frames.optimizer_called_by(self._files)

    def is_elsewhere(self, parameter: Any) -> bool:
        return bool(parameter.device.type != "xla")

    def reducing(self, function: Callable[..., Any]) -> Callable[..., Any]:

        def reduce(*args: Any, **kwargs: Any) -> Any:
            self._reduced = True
            return function(*args, **kwargs)

        return reduce

    def reduces_by_itself(self) -> bool:
        xr: Any = sys.modules.get("torch_xla.runtime")
        spmd = xr is not None and runtime.is_running() and bool(xr.is_spmd())
        return spmd or super().reduces_by_itself()


def watch(
    places: Places,
    namespace: Mapping[str, Any],
    names: Replacements,
    stack: contextlib.ExitStack,
    *,
    steps: int | None,
    nan: bool,
) -> Callable[[], DebugReport | None]:
    """Begin to record; returns a function that makes the report.

    `names` and `stack` end the recording.
    """
    recorder = XlaRecorder(places.files, steps)
    gradients = _XlaGradients(recorder, places.files, namespace)
    finite = FiniteCheck(recorder, gradients) if nan else None
    runtime.wrap_step_marker(recorder.wrap_marker, names.set)
    xla_model = importlib.import_module("torch_xla.core.xla_model")
    for name in private_names.REDUCING:
        names.set(xla_model, name, gradients.reducing(getattr(xla_model, name)))
    stack.enter_context(recorder)
    stack.enter_context(gradients.watching())
    if finite is not None:
        stack.enter_context(finite.watching())
    return XlaReportBuilder(recorder, gradients, places, finite).report
