"""What all sides know of torch_xla's SPMD mode, in which one process drives all cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

VARIABLE = "XLA_USE_SPMD"
"""Set by `xr.use_spmd()`, and read by torch_xla at its first use of a device (2.8, 2.9)."""


def is_on(env: Mapping[str, str]) -> bool:
    """Whether torch_xla takes an environment for one in which SPMD is on."""
    return is_yes(env.get(VARIABLE, ""))


def is_yes(value: str) -> bool:
    """Whether torch_xla takes a variable's value for yes (`check_env_flag`)."""
    return value == "true" or (value.isdigit() and int(value) > 0)


def plain(tensor: Any) -> Any:
    """The tensor inside an `XLAShardedTensor`; any other tensor as it is.

    `xs.mark_sharding` gives such a wrapper, and so does every operation on one, gradients and
    what an optimizer keeps of them included (measured on torch_xla 2.9). What is inside is the
    whole tensor: reading it gathers all shards.
    """
    module = sys.modules.get("torch_xla.distributed.spmd.xla_sharded_tensor")
    if module is None or not is_on(os.environ):
        return tensor
    torch = sys.modules["torch"]
    inner = tensor
    if torch._is_functional_tensor(inner):
        # What an operation has made, or has changed in place, wears one more wrapper.
        torch._sync(inner)
        inner = torch._from_functional_tensor(inner)
    return inner.global_tensor if isinstance(inner, module.XLAShardedTensor) else tensor
