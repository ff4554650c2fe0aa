"""Autocast of `scaled_dot_product_attention`, which torch_xla leaves out and CUDA's includes.

Without it, the inputs have two dtypes if a model rotates queries and keys in float32, as
transformers' Llama does, and torch refuses them (measured with torch_xla 2.9).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def cast_attention() -> torch.library.Library:
    """Let `torch.autocast("xla")` cast the inputs of attention, for the rest of this process.

    The registration lasts as long as the returned object, which is cached.
    """
    library = torch.library.Library("aten", "IMPL", "AutocastXLA")
    library.impl("scaled_dot_product_attention", _attention)
    return library


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    query, key, value = _cast(query), _cast(key), _cast(value)
    mask = None if attn_mask is None else _cast(attn_mask)
    with torch.autocast("xla", enabled=False):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, *rest, **options
        )


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast float32 on the device to autocast's dtype; boolean masks and float64 stay."""
    if tensor.dtype == torch.float32 and tensor.device.type == "xla":
        return tensor.to(torch.get_autocast_dtype("xla"))
    return tensor
