"""Compilations of plain torch are counted for the heartbeat."""

from __future__ import annotations

import importlib

import pytest

from tpunb.backends.torch.steps import CALLBACK, Steps


@pytest.mark.usefixtures("starts_processes")  # torch.compile looks for compilers
def test_compilations_are_counted_also_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    callback = importlib.import_module(CALLBACK)
    monkeypatch.setattr(callback.callback_handler, "clear", callback.callback_handler.clear)
    steps = Steps()
    steps._watch_compilations(callback)
    try:
        for count in (1, 2):
            torch._dynamo.reset()
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
            _, begun, ended, nanoseconds, _, _ = steps.counts()
            assert begun == ended == count
            assert nanoseconds > 0
    finally:
        type(callback.callback_handler).clear(callback.callback_handler)
