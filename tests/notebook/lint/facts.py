"""Tests lint's claims about torch and torch_xla on the CPU; prints one JSON object."""

import io
import json
import os
import sys
import warnings
from collections.abc import Callable

os.environ["PJRT_DEVICE"] = "CPU"
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

warnings.simplefilter("ignore")
device = torch_xla.device()
ones = torch.ones(2, 2, device=device)


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load() -> None:
    file = io.BytesIO()
    torch.save({"a": torch.ones(1)}, file)
    file.seek(0)
    torch.load(file, map_location=device)


def fused() -> None:
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(ones).sum().backward()
    optimizer.step()


def saved() -> str:
    file = io.BytesIO()
    torch.save({"a": ones}, file)
    file.seek(0)
    return str(torch.load(file)["a"].device)


def left_behind() -> list[object]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(device)
    held = optimizer.param_groups[0]["params"][0]
    return [held.device.type, model.weight.device.type, held is model.weight]


def cuda_autocast() -> str:
    with torch.autocast("cuda"):
        return str((ones @ ones).dtype)


def cuda_bfloat16() -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pass


def checkpointed(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    leaf = ones.clone().requires_grad_()
    checkpoint(nn.Linear(2, 2).to(device), leaf, use_reentrant=reentrant).sum().backward()


def checkpointed_by_xla() -> None:
    from torch_xla.distributed.fsdp import checkpoint_module
    from torch_xla.utils.checkpoint import checkpoint

    leaf = ones.clone().requires_grad_()
    layer = nn.Linear(2, 2).to(device)
    checkpoint(layer, leaf, use_reentrant=True).sum().backward()
    checkpoint_module(layer)(leaf).sum().backward()


json.dump(
    {
        "nprocs": message(lambda: xmp.spawn(print, nprocs=8)),
        "device-before-ranks": message(lambda: torch_xla.launch(print)),
        "device-number": message(lambda: torch_xla.device(1)),
        "cuda-call": message(lambda: ones.cuda()),
        "cuda-amp": cuda_autocast(),
        "cuda-bfloat16": message(cuda_bfloat16),
        "fused-optimizer": message(fused),
        "data-parallel": nn.DataParallel(nn.Linear(2, 2)).device_ids,
        "compile-backend": message(lambda: torch.compile(lambda x: x * 2)(ones)),
        "optimizer-before-device": left_behind(),
        "sampler-and-shuffle": message(
            lambda: DataLoader([1], shuffle=True, sampler=SequentialSampler([1]))
        ),
        "torch-save-on-xla": saved(),
        "load-to-xla": message(load),
        "changing-shape": list(ones[ones > 0].shape),
        "missing": [n for n in ("get_ordinal", "xrt_world_size") if not hasattr(xm, n)],
        "torch-checkpoint": message(lambda: checkpointed(True)),
        "torch-checkpoint without reentry": message(lambda: checkpointed(False)),
        "checkpoint of torch_xla": message(checkpointed_by_xla),
    },
    sys.stdout,
)
