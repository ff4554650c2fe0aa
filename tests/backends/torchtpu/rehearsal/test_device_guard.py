"""What must not end the process while torch asks for the type of the rehearsed device."""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.drivers.ranks import Ranks


def failing() -> None:
    """In a rank: without our DeviceGuard the process ends here."""
    from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install

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


def interrupted() -> None:
    """In a rank: without our handler the process ends in the first of these operations."""
    from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install

    install()
    leaf = torch.ones(2, device="tpu", requires_grad=True)
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))

    def train(leaf: torch.Tensor) -> None:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-4))
        while True:
            leaf = (leaf * 1).view(2)[:].detach().requires_grad_()

    for _ in range(300):
        with pytest.raises(KeyboardInterrupt):
            train(leaf)


def test_interrupts_do_not_end_the_process(ranks: Ranks) -> None:
    ranks.values(interrupted, 1)


def deferred() -> None:
    from tpunb.backends.torchtpu.rehearsal import device_guard, rehearsed_device

    rehearsed_device.install()
    guard = device_guard.make_device_guard()
    handler, found = signal.getsignal(signal.SIGINT), []
    with contextlib.suppress(KeyboardInterrupt):
        # The answer is looked for and called, with Ctrl-C in between.
        found.append((guard.type_, signal.raise_signal(signal.SIGINT))[0]())
        found.append("the next line")
    assert found == [torch._C._autograd.DeviceType.PrivateUse1]
    with pytest.raises(KeyboardInterrupt):  # at once
        found.append(signal.raise_signal(signal.SIGINT))
    assert len(found) == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Jupyter does, for each cell
    device_guard.defer_interrupts()
    again = signal.getsignal(signal.SIGINT)
    device_guard.defer_interrupts()
    assert type(again) is type(handler)
    assert signal.getsignal(signal.SIGINT) is again


def test_an_interrupt_waits_for_the_answer(ranks: Ranks) -> None:
    ranks.values(deferred, 1)
