"""Names of tensors in the user's code: of a module's parameter, or of a variable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch_xla

from tpunb.backends.rehearsal.call import users_frames
from tpunb.utils.frame_locals import locals_of

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_MOST_ITEMS = 64
"""Items of a list or dict that is searched for tensors, at most."""


class TensorNames:
    """The tensors that are visible to the user's running code. Takes ms for large models."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._parameters: dict[int, list[str]] = {}
        scopes = list(_scopes())
        for scope in scopes:  # a parameter's own name is clearer than `p` in a loop over all
            for name, value in scope.items():
                if isinstance(value, torch.nn.Module):
                    self._add(f"{name}.", value.named_parameters(), self._parameters)
                    self._add(f"{name}.", value.named_buffers())
        leaves: dict[int, list[str]] = {}
        for scope in scopes:
            for name, value in scope.items():
                self._add("", _tensors(name, value), leaves)
        self._parameters = leaves | self._parameters

    def _add(
        self,
        prefix: str,
        tensors: Iterable[tuple[str, torch.Tensor]],
        parameters: dict[int, list[str]] | None = None,
    ) -> None:
        def add(tensor: torch.Tensor, name: str) -> None:
            number = _XLAC._xla_get_tensor_id(tensor)
            self._names.setdefault(number, name)
            if parameters is not None and leaf:
                parameters.setdefault(number, []).append(name)

        for name, tensor in tensors:
            if tensor.device.type != "xla":
                continue
            leaf = tensor.is_leaf and tensor.requires_grad
            add(tensor, f"{prefix}{name}")
            if tensor.is_leaf and tensor.grad is not None:
                add(tensor.grad, f"{prefix}{name}.grad")

    def parameters(self, numbers: Iterable[int]) -> list[list[str]]:
        """For each of these tensors all names of the parameter, or of its gradient; [] for others.

        Those in modules, if there are any: `p` in a loop is another parameter each time.
        """
        return [self._parameters.get(each, []) for each in numbers]

    def of(self, numbers: Iterable[int]) -> list[str]:
        """The names of the tensors with these numbers, without those that have no name."""
        return list(dict.fromkeys(self._names[each] for each in numbers if each in self._names))


def _scopes() -> Iterator[Mapping[str, object]]:
    frames = users_frames()
    for frame in frames:
        yield {name: each for name, each in locals_of(frame).items() if not name.startswith("_")}
    if frames:
        yield {
            name: each for name, each in frames[-1].f_globals.items() if not name.startswith("_")
        }


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif type(value) in (list, tuple, dict) and len(value) <= _MOST_ITEMS:  # type: ignore[arg-type]
        items = value.items() if isinstance(value, dict) else enumerate(value)  # type: ignore[arg-type]
        yield from (
            (f"{name}[{key!r}]", each) for key, each in items if isinstance(each, torch.Tensor)
        )
