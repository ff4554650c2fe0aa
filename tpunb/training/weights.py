"""`save_weights`: a model's weights as safetensors, for use anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpunb.errors import CheckpointError
from tpunb.training.checkpoint_device import ToCpu, settle
from tpunb.training.checkpoint_files import Folder
from tpunb.training.place import is_first


def save_weights(
    model: nn.Module | Mapping[str, torch.Tensor],
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    **notes: str,
) -> None:
    """Write weights to a .safetensors file: `save_weights(model, "model.safetensors")`.

    Call it in every rank; rank 0 writes. The file needs neither torch_xla nor tpunb, nor trust,
    because it can hold tensors only: `safetensors.torch.load_model(model, path)`, or what
    transformers, timm and others offer. Tied weights are in it once. `dtype`: of floating-point
    weights in the file (theirs). `notes`: texts that the file carries along.

    It is whole or not there. Raises CheckpointError if it cannot be written.
    """
    settle()
    if not is_first():
        return
    # Loaded here: only who writes such a file needs it.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    state = dict(model.state_dict() if isinstance(model, nn.Module) else model)
    if others := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise CheckpointError(
            f"save_weights: {', '.join(others)}: a .safetensors file holds tensors only; "
            "tpunb.save takes the rest",
            str(path),
        )
    to_cpu = ToCpu(state)
    found: dict[Any, str] = {}
    weights: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        weight = to_cpu(value).detach() if value.device.type != "cpu" else value.detach()
        same = weight.data_ptr(), weight.shape, weight.stride()
        if weight.numel() and same in found:
            tied[name] = found[same]
            continue
        found[same] = name
        if dtype is not None and weight.is_floating_point():
            weight = weight.to(dtype)
        weight = weight.contiguous()
        if weight.untyped_storage().nbytes() > weight.nbytes:  # a part of another
            weight = weight.clone()
        weights[name] = weight
    file = Path(path).expanduser()
    try:
        with Folder(file.parent).write(file.name) as out:
            save_file(weights, out.name, {"format": "pt", **tied, **notes})
    except (OSError, SafetensorError) as error:
        size = sum(weight.nbytes for weight in weights.values()) / 1e6
        reason = f"cannot write {file} ({size:.1f} MB): {error}"
        raise CheckpointError(f"save_weights: {reason}", str(file)) from error
