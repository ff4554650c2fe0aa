"""torch.tpu and torch.accelerator."""

from __future__ import annotations

import importlib
import re

import pytest

from tpunb.backends.rehearsal.errors import NotRehearsedError

PUBLIC = """EagerMode Event Precision Stream allow_excess_precision current_device current_stream
default_generators default_stream device device_count device_of eager_mode get_amp_supported_dtype
get_device_name get_device_properties get_rng_state initial_seed is_available is_initialized
manual_seed manual_seed_all precision set_device set_eager_mode set_rng_state set_stream stream
synchronize topology_aware_mesh compiler distributed ops optimizers pallas profiler""".split()
"""Of torch_tpu 0.2.0."""


def test_all_public_names_are_there() -> None:
    import torch

    assert [name for name in PUBLIC if not hasattr(torch.tpu, name)] == []
    assert importlib.import_module("torch.tpu.distributed").spmd_safe(len) is len
    with pytest.raises(NotRehearsedError, match=r"torch\.tpu\.ops\.splash_sdpa is not rehearsed"):
        torch.tpu.ops.splash_sdpa()


def test_twins_of_the_accelerator_are_for_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for call, instead in (
        (torch.tpu.synchronize, "synchronize"),
        (torch.tpu.is_available, "is_available"),
        (torch.tpu.device_count, "device_count"),
        (lambda: torch.tpu.set_device(0), "set_device_index"),
        (lambda: torch.tpu.device(0), "device_index"),
    ):
        with pytest.raises(RuntimeError, match=re.escape(f"Use torch.accelerator.{instead}")):
            call()
    monkeypatch.setenv("TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS", "1")
    with pytest.warns(UserWarning, match=r"Use torch\.accelerator\.set_device_index"):
        torch.tpu.set_device(0)
    with (
        pytest.warns(UserWarning, match="set_device_index"),
        pytest.raises(ValueError, match="Cannot set TPU device to index 1"),
    ):
        torch.tpu.set_device(1)


def test_accelerator() -> None:
    import torch
    from torch import accelerator

    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("tpu")
    assert (accelerator.device_count(), accelerator.current_device_index()) == (1, 0)
    accelerator.set_device_index(0)
    accelerator.synchronize()
    with accelerator.device_index(0):
        pass
    with pytest.raises(ValueError, match="Cannot set TPU device to index 1"):
        accelerator.set_device_index(1)
    accelerator.set_stream(accelerator.current_stream())


def test_memory_of_the_accelerator() -> None:
    from torch import accelerator

    free, total = accelerator.memory.get_memory_info()
    assert 0 < free < total
    assert 0 < accelerator.memory_allocated() <= accelerator.max_memory_allocated()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()
    for name in ("empty_host_cache", "get_device_capability"):  # of later versions
        getattr(accelerator, name, int)()


def test_streams_and_events() -> None:
    import torch

    stream, start, end = torch.tpu.Stream(), torch.tpu.Event(enable_timing=True), torch.tpu.Event()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    with torch.tpu.stream(stream):
        start.record()
        stream.record_event(end)
    stream.wait_event(end)
    stream.wait_stream(torch.tpu.default_stream())
    stream.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    torch.Event(device="tpu").record()
    assert isinstance(stream, torch.Stream)
