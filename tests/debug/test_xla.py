"""The names of torch_xla that the report stands on are there, and count what they are taken for."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest
import torch

from tpunb.debug import xla


@pytest.fixture(scope="module")
def device() -> torch.device:
    torch_xla = import_module("torch_xla")
    found: torch.device = torch_xla.device()
    torch.zeros(1, device=found).cpu()
    return found


def sync() -> None:
    import_module("torch_xla").sync(wait=True)


def test_the_version_was_looked_at() -> None:
    version = import_module("torch_xla").__version__
    assert version.startswith(xla.VERSIONS), f"look at tpunb.debug.xla for torch_xla {version}"


def test_the_names_are_there(device: torch.device) -> None:
    xlac = import_module("torch_xla")._XLAC
    assert callable(getattr(xlac, xla.STEP_MARKER))
    assert xlac._xla_step_marker.__doc__.startswith("_xla_step_marker(device: str")
    assert callable(getattr(xlac, xla.INITIALIZED))
    xm = import_module("torch_xla.core.xla_model")
    assert callable(getattr(xm, xla.CLOSURES))
    assert "optimizer" in inspect.signature(xm.reduce_gradients).parameters
    assert all(callable(getattr(xm, name)) for name in xla.REDUCING)
    assert xla.running()


def test_programs_are_counted_when_they_start(device: torch.device) -> None:
    x = torch.ones(3, 7, device=device)
    sync()
    before = xla.counts()
    x = x * 3.5
    assert xla.counts() == before  # it is lazy
    sync()
    once = xla.counts()
    assert (once.compiled, once.started) == (before.compiled + 1, before.started + 1)
    assert xla.compile_seconds() > 0
    assert xla.graph_size() > 1
    x = x * 4.5  # another number is data
    sync()
    again = xla.counts()
    assert (again.compiled, again.started) == (once.compiled, once.started + 1)


def test_values_that_are_read_are_counted(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    sync()
    before = xla.counts()
    x[0].item()
    assert xla.counts().read > before.read
    assert xla.counts().fallen == before.fallen


def test_operators_on_the_cpu_are_counted(device: torch.device) -> None:
    x = torch.ones(3, 3, device=device)
    before = xla.counts()
    torch.linalg.eigvals(x)
    assert xla.counts().fallen > before.fallen
    assert any("eig" in name for name in xla.fallback_names())
    assert xla.SCALAR not in xla.fallback_names()


def test_a_cpu_does_not_say_how_much_memory_it_has(device: torch.device) -> None:
    assert xla.memory() is None
