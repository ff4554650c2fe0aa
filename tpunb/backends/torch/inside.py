"""Private names of torch that `%%tpu_debug` uses (torch 2.9, 2.11 and 2.13)."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeTensor", "FunctionalTensor", "TorchDispatchMode", "functorch"]

_torch: Any = torch
functorch: Any = _torch._C._functorch
"""Tells tensors of vmap and grad."""
