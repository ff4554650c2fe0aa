"""`--nan`: the first module and step in which a number is not finite.

Each module's output, and each gradient, is asked on the device whether all of it is finite; the
answers are read once a step. So programs differ from those without `--nan`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook

from tpunb.debug.gradients import Gradients
from tpunb.debug.place import Place
from tpunb.debug.recorder import Recorder


@dataclass(frozen=True)
class NotFinite:
    """Where the first such number was."""

    what: str
    """'the output of model.encoder.norm (LayerNorm)', 'the gradient of model.head.weight'."""
    place: Place | None
    step: int


class Finite:
    """Looks for the first number that is not finite."""

    def __init__(self, recorder: Recorder, gradients: Gradients) -> None:
        self._recorder = recorder
        self._gradients = gradients
        self._flags: list[torch.Tensor] = []
        self._what: list[tuple[str, Any, Place | None, int]] = []
        self._answers: torch.Tensor | None = None
        self.first: NotFinite | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which modules and gradients are looked at, until something is found."""
        handle = register_module_forward_hook(self._forward)
        self._gradients.before_step.append(self._backward)
        self._recorder.before_backward.append(self._loss)
        self._recorder.before_mark.append(self._ask)
        self._recorder.after_mark.append(self._read)
        try:
            yield
        finally:
            handle.remove()
            with self._recorder.quiet():
                self._ask()
                self._read()

    def _forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        with self._recorder.quiet():
            # Where a module is given what is not finite already, it is not the module's doing.
            if not self._flags:
                self._add("what goes into the model", None, args)
            self._add("output", module, output)

    def _loss(self, loss: object) -> None:
        with self._recorder.quiet():
            self._add("the loss", None, loss)

    def _backward(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in reversed(named):  # in the order of a backward pass
            if parameter.grad is not None:
                self._add(f"the gradient of {name}", None, parameter.grad)

    def _add(self, what: str, module: torch.nn.Module | None, value: Any) -> None:
        if self.first is not None:
            return
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                with torch.no_grad():
                    self._flags.append(torch.isfinite(tensor).all())
                place, step = self._recorder.place(), self._recorder.step
                self._what.append((what, module, place, step))

    def _ask(self) -> None:
        if self._flags and self.first is None:
            with self._recorder.quiet():
                device = self._flags[-1].device
                self._answers = torch.stack([flag.to(device) for flag in self._flags])

    def _read(self) -> None:
        if self._answers is not None:
            with self._recorder.quiet():
                answers = self._answers.tolist()
                if not all(answers):
                    what, module, place, step = self._what[answers.index(False)]
                    self.first = NotFinite(self._named(what, module), place, step)
        self._flags, self._what, self._answers = [], [], None

    def _named(self, what: str, module: torch.nn.Module | None) -> str:
        if module is None:
            return what
        self._gradients.find_models()
        for name, model in self._gradients.models.items():
            for path, part in model.named_modules():
                if part is module:
                    full = f"{name}.{path}" if path else name
                    return f"the output of {full} ({type(module).__name__})"
        return f"the output of a {type(module).__name__}"
