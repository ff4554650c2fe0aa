"""Errors that hooks raise in a backward pass on a rehearsed TPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.drivers.ranks import Ranks


def failing() -> None:
    """In a rank: without our DeviceGuard the process ends here."""
    from tpunb.backends.torchtpu.rehearsal.device import install

    install()

    def hook(value: Any) -> None:
        raise KeyError("of the hook")

    registrations: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
        lambda leaf, value: value.register_hook(hook),
        lambda leaf, value: value.register_hook(lambda grad: grad.reshape(7)),
        lambda leaf, value: leaf.register_post_accumulate_grad_hook(hook),
        lambda leaf, value: value.grad_fn.register_prehook(hook),
    ]
    for register in registrations:
        leaf = torch.ones(2, device="tpu", requires_grad=True)
        value = leaf * 1
        handle = register(leaf, value)
        with pytest.raises((KeyError, RuntimeError)) as raised:
            value.sum().backward()
        assert "of the hook" in str(raised.value) or "[7]" in str(raised.value)
        handle.remove()
    leaf = torch.ones(2, device="tpu", requires_grad=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(2, device="tpu").sum().backward()
    (leaf * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]


def test_errors_of_hooks_reach_the_program(ranks: Ranks) -> None:
    ranks.values(failing, 1)
