"""What an optimizer finds when it makes its step: gradients, and where its parameters are."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tpunb.debug import xla
from tpunb.debug.place import Place
from tpunb.debug.recorder import Recorder

_FIRST = 3
"""So many steps of an optimizer are looked at, then the 4th, 8th, 16th …"""
_TORCH = ("torch.optim", "torch.utils", "torch.autograd")
"""What stands between a call of an optimizer's step and its hooks: its wrappers, schedulers'."""
_REDUCING = ("DistributedDataParallel", "FullyShardedDataParallel", "XlaFullyShardedDataParallel")


@dataclass
class Stepped:
    """What was seen of one optimizer."""

    optimizer: Optimizer
    place: Place | None
    steps: int = 0
    reduced: bool = False
    """Gradients were reduced over the cores before a step."""
    without: dict[int, torch.Tensor] | None = None
    """Parameters that have had no gradient at any step that was looked at."""
    elsewhere: list[torch.Tensor] = field(default_factory=list)
    """Parameters that are not on the XLA device."""

    def parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


class Gradients:
    """Watches all optimizers of the process. `namespace`: the notebook's."""

    def __init__(
        self, recorder: Recorder, files: Mapping[str, Any], namespace: Mapping[str, Any]
    ) -> None:
        self._recorder = recorder
        self._files = files
        self._namespace = namespace
        self._reduced = False
        self.seen: dict[int, Stepped] = {}
        self.names: dict[int, str] = {}
        """The names of parameters, by their id: 'model.head.weight'."""
        self.models: dict[str, torch.nn.Module] = {}
        self.before_step: list[Callable[[list[tuple[str, torch.Tensor]]], None]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which optimizers are seen."""
        handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reducing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that reduces gradients over the cores, noted."""

        def reduce(*args: Any, **kwargs: Any) -> Any:
            self._reduced = True
            return function(*args, **kwargs)

        return reduce

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._recorder.quiet():
            stepped = self.seen.get(id(optimizer))
            if stepped is None:
                stepped = Stepped(optimizer, self._recorder.place())
                self.seen[id(optimizer)] = stepped
            stepped.steps += 1
            stepped.reduced = stepped.reduced or self._reduced or not self._called_here()
            self._reduced = False
            if stepped.steps <= _FIRST or stepped.steps & (stepped.steps - 1) == 0:
                self._look(stepped)
            for act in self.before_step:
                named = [(self.name(p), p) for p in stepped.parameters()]
                act(named)
        self._recorder.in_optimizer = True

    def _called_here(self) -> bool:
        """Whether a line of the notebook calls the optimizer's step itself.

        What else calls it reduces the gradients first: xm.optimizer_step, tpunb's, a library's.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_TORCH):
            frame = frame.f_back
        return frame is not None and frame.f_code.co_filename in self._files

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._recorder.in_optimizer = False
        self._recorder.optimizer_stepped(max(one.steps for one in self.seen.values()))

    def _look(self, stepped: Stepped) -> None:
        self.find_models()
        parameters = stepped.parameters()
        without = {id(p): p for p in parameters if p.requires_grad and p.grad is None}
        if stepped.without is None:
            stepped.without = without
        else:
            stepped.without = {
                key: stepped.without[key] for key in stepped.without if key in without
            }
        stepped.elsewhere = [p for p in parameters if p.device.type != "xla"]

    def find_models(self) -> None:
        """Take the models that the notebook's lines know now, and their parameters' names."""
        for name, model in _models(self._files, self._namespace):
            self.models.setdefault(name, model)
            for path, parameter in model.named_parameters():
                self.names.setdefault(id(parameter), f"{name}.{path}")

    def name(self, parameter: torch.Tensor) -> str:
        """'model.head.weight', or the parameter's shape where nobody knows it."""
        known = self.names.get(id(parameter))
        return known or f"a parameter of {'×'.join(map(str, parameter.shape)) or 'one number'}"

    def reduces_by_itself(self) -> bool:
        """Whether a model reduces its gradients during the backward pass, or SPMD does."""
        spmd: Any = sys.modules.get("torch_xla.runtime")
        return (spmd is not None and xla.running() and bool(spmd.is_spmd())) or any(
            any(kind.__name__ in _REDUCING for kind in type(module).__mro__)
            for model in self.models.values()
            for module in model.modules()
        )


def _models(
    files: Mapping[str, Any], namespace: Mapping[str, Any]
) -> Iterable[tuple[str, torch.nn.Module]]:
    """Models by the names of variables: those of the notebook's running functions first."""
    spaces: list[Mapping[str, Any]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename in files and frame.f_locals is not frame.f_globals:
            spaces.append(frame.f_locals)
        frame = frame.f_back
    found: dict[str, torch.nn.Module] = {}
    for space in [*spaces, namespace]:
        for name, value in list(space.items()):
            if isinstance(value, torch.nn.Module) and not name.startswith("_"):
                found.setdefault(name, value)
    parts = {id(part) for model in found.values() for part in model.children()}
    return [(name, model) for name, model in found.items() if id(model) not in parts]
