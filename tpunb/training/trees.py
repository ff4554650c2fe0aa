"""Batches are tensors in dicts, tuples, lists and dataclasses: one function for all of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same structure with each tensor changed; what is no tensor stays as it is."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(change, each) for each in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(change, each) for each in tree])
    if isinstance(tree, Mapping):  # also transformers' outputs, which are dataclasses too
        changed = {name: map_tensors(change, each) for name, each in tree.items()}
        return changed if type(tree) is dict else _filled(tree, changed)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # Frozen ones too: the copy is nobody else's yet.
            value = map_tensors(change, getattr(tree, field.name))
            object.__setattr__(twin, field.name, value)
        return twin
    return tree


def _filled(tree: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of a mapping of any kind with other values."""
    twin: Any = copy.copy(tree)
    for name, value in changed.items():
        twin[name] = value
    return twin


def leaves(tree: Any) -> list[Any]:
    """All that is in a structure and is none itself, in order."""
    if isinstance(tree, (list, tuple)):
        inside: list[Any] = list(tree)
    elif isinstance(tree, Mapping):
        inside = list(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        inside = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        return [tree]
    return [leaf for each in inside for leaf in leaves(each)]
