"""Batches and outputs: tensors nested in dicts, tuples, lists and dataclasses.

(`torch.utils._pytree` does not support dataclasses, and is private.)
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a copy of the structure with `change` applied to each tensor."""
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
            # Also for frozen dataclasses: nothing else has a reference to the copy yet.
            value = map_tensors(change, getattr(tree, field.name))
            object.__setattr__(twin, field.name, value)
        return twin
    return tree


def _filled(tree: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping of any type with other values."""
    twin: Any = copy.copy(tree)
    for name, value in changed.items():
        twin[name] = value
    return twin


def leaves(tree: Any) -> list[Any]:
    """Return the values in a structure that are not containers, in order."""
    if isinstance(tree, (list, tuple)):
        values: list[Any] = list(tree)
    elif isinstance(tree, Mapping):
        values = list(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        return [tree]
    return [leaf for each in values for leaf in leaves(each)]
