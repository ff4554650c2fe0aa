"""Gradients and parameters at each optimizer step, and the first value that is not finite."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tpunb.backends.torch.inside import FakeTensor, FunctionalTensor, functorch
from tpunb.diagnostics.cell.frames import SourceLine
from tpunb.diagnostics.cell.recorder import Recorder
from tpunb.utils.frame_locals import is_function, locals_of

_FIRST = 3
"""Number of first steps of an optimizer that are all inspected; then the 4th, 8th, 16th, …"""
_REDUCING = ("DistributedDataParallel", "FullyShardedDataParallel", "XlaFullyShardedDataParallel")


@dataclass
class OptimizerStats:
    optimizer: Optimizer
    place: SourceLine | None
    steps: int = 0
    reduced: bool = False
    """True if gradients were reduced over the cores before a step."""
    without: dict[int, torch.Tensor] | None = None
    """Parameters without a gradient at every inspected step."""
    elsewhere: list[torch.Tensor] = field(default_factory=list)
    """Parameters that are not on the device."""

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class StepCheck(Protocol):
    """A further check of each optimizer step."""

    def before(self, stepped: OptimizerStats, inspected: bool) -> None:
        """`inspected`: this step is one of those that may cost time."""

    def after(self, stepped: OptimizerStats) -> None: ...


class Gradients(ABC):
    """Observes all optimizers of the process. `namespace`: the notebook's."""

    def __init__(
        self, recorder: Recorder, files: Mapping[str, Any], namespace: Mapping[str, Any]
    ) -> None:
        self._recorder = recorder
        self._files = files
        self._namespace = namespace
        self.optimizers: dict[int, OptimizerStats] = {}
        self.names: dict[int, str] = {}
        """The names of parameters, keyed by their id(): 'model.head.weight'."""
        self.models: dict[str, torch.nn.Module] = {}
        self.checks: list[StepCheck] = []
        self.before_step: list[Callable[[list[tuple[str, torch.Tensor]]], None]] = []

    @abstractmethod
    def is_reduced(self) -> bool:
        """True if gradients have been reduced over the cores; called right before a step."""

    @abstractmethod
    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        """True for a parameter that is not on the device, but should be."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # otherwise torch.compile would trace this as well
            return
        with self._recorder.quiet():
            stepped = self.optimizers.get(id(optimizer))
            if stepped is None:
                stepped = OptimizerStats(optimizer, self._recorder.place())
                self.optimizers[id(optimizer)] = stepped
            stepped.steps += 1
            stepped.reduced = self.is_reduced() or stepped.reduced
            inspected = stepped.steps <= _FIRST or stepped.steps & (stepped.steps - 1) == 0
            if inspected:
                self._inspect(stepped)
            for check in self.checks:
                check.before(stepped, inspected)
            for act in self.before_step:
                named = [(self.name(p), p) for p in stepped.parameters()]
                act(named)
        self._recorder.in_optimizer = True

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._recorder.in_optimizer = False
        for check in self.checks:
            with self._recorder.quiet():
                check.after(self.optimizers[id(optimizer)])
        self._recorder.optimizer_stepped(max(stats.steps for stats in self.optimizers.values()))

    def _inspect(self, stepped: OptimizerStats) -> None:
        self.find_models()
        parameters = stepped.parameters()
        without = {id(p): p for p in parameters if p.requires_grad and p.grad is None}
        if stepped.without is None:
            stepped.without = without
        else:
            stepped.without = {
                key: stepped.without[key] for key in stepped.without if key in without
            }
        stepped.elsewhere = [p for p in parameters if self.is_elsewhere(p)]

    def find_models(self) -> None:
        """Find the notebook's models, and name their parameters."""
        for name, model in _models(self._files, self._namespace):
            self.models.setdefault(name, model)
            for path, parameter in model.named_parameters():
                self.names.setdefault(id(parameter), f"{name}.{path}")

    def name(self, parameter: torch.Tensor) -> str:
        """'model.head.weight', or the shape of a parameter that belongs to no known model."""
        known = self.names.get(id(parameter))
        return known or f"a parameter of {'×'.join(map(str, parameter.shape)) or 'one number'}"

    def reduces_by_itself(self) -> bool:
        """True if a model reduces its gradients in the backward pass."""
        return any(
            any(kind.__name__ in _REDUCING for kind in type(module).__mro__)
            for model in self.models.values()
            for module in model.modules()
        )


def _models(
    files: Mapping[str, Any], namespace: Mapping[str, Any]
) -> Iterable[tuple[str, torch.nn.Module]]:
    """Models with their variable names, those in running functions of the notebook first."""
    spaces: list[Mapping[str, Any]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files and is_function(frame):
            spaces.append(locals_of(frame))
        frame = frame.f_back
    models: dict[str, torch.nn.Module] = {}
    for space in [*spaces, namespace]:
        for name, value in list(space.items()):
            if isinstance(value, torch.nn.Module) and not name.startswith("_"):
                models.setdefault(name, value)
    parts = {id(part) for model in models.values() for part in model.children()}
    return [(name, model) for name, model in models.items() if id(model) not in parts]


def _has_values(tensor: Any) -> bool:
    """True for tensors of floats that can be read: not while a function is traced or transformed.

    torch.compile traces with tensors of its own; torch.func.vmap and grad wrap them
    (`is_functorch_wrapped_tensor` is private; torch 2.9 to 2.13).
    """
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, (FakeTensor, FunctionalTensor)):
        return False
    return tensor.is_floating_point() and not functorch.is_functorch_wrapped_tensor(tensor)


@dataclass(frozen=True)
class NotFinite:
    """The origin of the first NaN or infinity."""

    what: str
    """'the output of model.encoder.norm (LayerNorm)', 'the gradient of model.head.weight'."""
    place: SourceLine | None
    step: int


class FiniteCheck:
    """Finds the first module and step with a value that is not finite (`--nan`).

    For each module output and each gradient, the device computes whether all values are finite; the
    answers are read once per step. Programs therefore differ from those without `--nan`.
    """

    def __init__(self, recorder: Recorder, gradients: Gradients) -> None:
        self._recorder = recorder
        self._gradients = gradients
        self._flags: list[torch.Tensor] = []
        self._what: list[tuple[str, Any, SourceLine | None, int]] = []
        self._answers: torch.Tensor | None = None
        self.first: NotFinite | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which modules and gradients are checked, until something is found."""
        handle = register_module_forward_hook(self._forward)
        self._gradients.before_step.append(self._backward)
        self._recorder.before_backward.append(self._loss)
        self._recorder.before_read.append(self._compute)
        self._recorder.after_step.append(self._read)
        try:
            yield
        finally:
            handle.remove()
            with self._recorder.quiet():
                self._compute()
                self._read()

    def _forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        with self._recorder.quiet():
            # A module whose input is already not finite is not the origin.
            if not self._flags:
                self._check("the model's input", None, args)
            self._check("output", module, output)

    def _loss(self, loss: object) -> None:
        with self._recorder.quiet():
            self._check("the loss", None, loss)

    def _backward(self, named: list[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in reversed(named):  # in the order of a backward pass
            if parameter.grad is not None:
                self._check(f"the gradient of {name}", None, parameter.grad)

    def _check(self, what: str, module: torch.nn.Module | None, value: Any) -> None:
        if self.first is not None:
            return
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if _has_values(tensor):
                with torch.no_grad():
                    self._flags.append(torch.isfinite(tensor).all())
                place, step = self._recorder.place(), self._recorder.step
                self._what.append((what, module, place, step))

    def _compute(self) -> None:
        if self._flags and self.first is None:
            with self._recorder.quiet():
                device = self._flags[-1].device
                self._answers = torch.stack([flag.to(device) for flag in self._flags])

    def _read(self) -> None:
        if self._answers is not None:
            with self._recorder.quiet():
                answers = self._answers.tolist()
                if not all(answers):
                    number = answers.index(False)
                    what, module, place, step = self._what[number]
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
