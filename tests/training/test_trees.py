"""Batches of every structure."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from tpunb.training.trees import leaves, map_tensors

ONE = torch.tensor([1.0])


class Named(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = "text"


@pytest.mark.parametrize(
    "tree",
    [
        ONE,
        [ONE, 3],
        (ONE, None, [ONE]),
        {"x": ONE, "deep": {"y": (ONE, "text")}},
        Named(ONE, {"z": ONE}),
        Frozen(ONE),
        Frozen([ONE], Frozen(ONE)),
        OrderedDict(x=ONE, y=2),
        UserDict(x=ONE),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_map_tensors_changes_tensors_only(tree: Any) -> None:
    before = str(leaves(tree))
    changed = map_tensors(lambda tensor: tensor * 2, tree)
    assert type(changed) is type(tree)
    assert str(leaves(tree)) == before
    assert len(leaves(tree)) >= 1
    for old, new in zip(leaves(tree), leaves(changed), strict=True):
        if isinstance(old, torch.Tensor):
            assert new.item() == 2.0
        else:
            assert new == old
    assert any(isinstance(leaf, torch.Tensor) for leaf in leaves(changed))


def test_map_tensors_in_batches_and_outputs_of_transformers() -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput
    from transformers.tokenization_utils_base import BatchEncoding

    output = SequenceClassifierOutput(logits=ONE, hidden_states=(ONE, ONE))
    for tree in (BatchEncoding({"input_ids": ONE, "attention_mask": ONE}), output):
        test_map_tensors_changes_tensors_only(tree)
    assert map_tensors(lambda tensor: tensor + 1, output).logits.item() == 2.0
