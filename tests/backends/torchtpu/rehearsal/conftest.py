"""Every test here has the rehearsed device; one process has it from its first test to its end."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _device() -> None:
    from tpunb.backends.torchtpu.rehearsal.rehearsed_device import install

    install()


@pytest.fixture(autouse=True)
def _same_numbers(_device: None) -> None:
    import torch

    torch.manual_seed(0)
