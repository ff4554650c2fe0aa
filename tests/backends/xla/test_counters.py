"""The counters of torch_xla that the report uses exist, and count what the report expects."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from tpunb.backends.xla import counters, private_names, runtime


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
    assert version.startswith(private_names.VERSIONS), (
        f"look at tpunb.backends.xla.private_names for torch_xla {version}"
    )


def test_programs_are_counted_when_they_start(device: torch.device) -> None:
    x = torch.ones(3, 7, device=device)
    sync()
    before = counters.read_counts()
    x = x * 3.5
    assert counters.read_counts() == before  # it is lazy
    sync()
    once = counters.read_counts()
    assert (once.compiled, once.started) == (before.compiled + 1, before.started + 1)
    assert counters.compile_seconds() > 0
    assert counters.graph_size() > 1
    x = x * 4.5  # another number is data
    sync()
    again = counters.read_counts()
    assert (again.compiled, again.started) == (once.compiled, once.started + 1)


def test_a_loop_over_a_compiled_function_executes_without_steps(device: torch.device) -> None:
    double = torch.compile(lambda x: x * 2, backend="openxla")
    x = torch.ones(3, device=device)
    double(x)
    xm = import_module("torch_xla.core.xla_model")
    xm.wait_device_ops()  # what has not ended is not counted yet
    before = counters.heartbeat_counts()
    for _ in range(4):
        double(x)
    xm.wait_device_ops()
    after = counters.heartbeat_counts()
    assert (after[0] - before[0], after[4] - before[4]) == (0, 4)


def test_values_that_are_read_are_counted(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    sync()
    before = counters.read_counts()
    x[0].item()
    assert counters.read_counts().read > before.read
    assert counters.read_counts().fallbacks == before.fallbacks


def test_operators_on_the_cpu_are_counted(device: torch.device) -> None:
    x = torch.ones(3, 3, device=device)
    before = counters.read_counts()
    torch.linalg.eigvals(x)
    assert counters.read_counts().fallbacks > before.fallbacks


def test_a_cpu_does_not_say_how_much_memory_it_has(device: torch.device) -> None:
    assert runtime.device_memory() is None
