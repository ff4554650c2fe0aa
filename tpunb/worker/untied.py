"""Notices that moving a module to the device has made a shared parameter two.

torch can give a tensor on the CPU the data of one on a GPU, but not of an XLA device or of
TorchTPU's: there `module.to(device)` makes new parameters, one for each place that names one.
Tied weights train apart from then on, without an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import ref

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tpunb.backends.rehearsal.call import CodeLine, running_line

_report: list[Callable[[str], object]] = []


def watch() -> None:
    """Watch `nn.Module.to`, for the rest of this process and in its forks."""
    move = nn.Module.to

    @functools.wraps(move)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tied = _tied(self)
        moved = move(self, *args, **kwargs)
        if tied and _parted(self, tied):
            _look_at_first_step(self, tied, running_line())
        return moved

    nn.Module.to = to  # type: ignore[method-assign]


def report_to(report: Callable[[str], object]) -> None:
    """Choose what gets the line about it, in this process."""
    _report[:] = [report]


def _tied(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _parted(module: nn.Module, tied: list[list[str]]) -> list[str]:
    """The names of the first parameter that is several by now; [] if there is none."""
    now = dict(module.named_parameters(remove_duplicate=False))
    return next((each for each in tied if len({id(now.get(name)) for name in each}) > 1), [])


def _look_at_first_step(module: nn.Module, tied: list[list[str]], line: CodeLine | None) -> None:
    """Report it in the first step of an optimizer: until then they may be tied again."""
    moved = ref(module)

    def look(optimizer: Optimizer, args: object, kwargs: object) -> None:
        hook.remove()
        module = moved()
        if module is None or not _report or not (names := _parted(module, tied)):
            return
        first, other = names[:2]
        _report[0](
            f"{line}: this move makes {first} and {other}, which were one parameter, two, which "
            f"train apart. Tie them again after it (model.{other} = model.{first}), or create the "
            "model on the device"
        )

    hook = register_optimizer_step_pre_hook(look)
