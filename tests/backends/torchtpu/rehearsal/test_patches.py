"""What only replacing functions of torch can do: storages, pinned memory."""

from __future__ import annotations

import pytest


def test_storages() -> None:
    import torch

    x = torch.ones(3, device="tpu")
    storage = x.untyped_storage()
    copied = storage.clone()
    assert copied.device.type == "tpu"
    assert copied.data_ptr() != storage.data_ptr()
    assert list(storage.cpu()) == list(torch.ones(3).untyped_storage())
    assert torch.UntypedStorage(4, device="tpu").nbytes() == 4
    assert torch.ones(3).untyped_storage().to(device="tpu").device.type == "tpu"
    storage.resize_(0)
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="cannot grow"):
        storage.resize_(100)
    assert torch.UntypedStorage(4).device.type == "cpu"


def test_pinned_memory() -> None:
    import torch

    x = torch.ones(3)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not pinned.clone().is_pinned()
    assert not torch.ones(3, device="tpu").is_pinned()
