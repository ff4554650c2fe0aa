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
from torchvision.ops import FrozenBatchNorm2d

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


def tied() -> list[bool]:
    embedding, head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    before = head.weight is embedding.weight
    model.to(device)
    return [before, head.weight is embedding.weight]


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


def through_batch_norm(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), norm.requires_grad_(False).eval()).to(device)
    model(ones.reshape(1, 1, 2, 2)).sum().backward()


def bag() -> str:
    import torch_xla.debug.metrics as metrics

    nn.EmbeddingBag(3, 2).to(device)(torch.tensor([[0, 1]]).to(device)).cpu()
    (name,) = [each for each in metrics.counter_names() if "embedding_bag" in each]
    return name


def variance_ratio() -> float:
    norm = nn.BatchNorm1d(1, momentum=1.0).to(device)
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    norm(values.to(device))
    assert norm.running_var is not None
    return float(norm.running_var / values.var())


def average() -> None:
    import torch.distributed as dist

    dist.init_process_group("xla", init_method="xla://")
    dist.all_reduce(ones, op=dist.ReduceOp.AVG)


json.dump(
    {
        "nprocs": message(lambda: xmp.spawn(print, nprocs=8)),
        "device-before-ranks": message(lambda: torch_xla.launch(print)),
        "device-number": message(lambda: torch_xla.device(1)),
        "cuda-call": message(lambda: ones.cuda()),
        "cuda-amp": cuda_autocast(),
        "cuda-bfloat16": message(cuda_bfloat16),
        "fused-optimizer": message(fused),
        "embedding-bag": bag(),
        "data-parallel": nn.DataParallel(nn.Linear(2, 2)).device_ids,
        "compile-backend": message(lambda: torch.compile(lambda x: x * 2)(ones)),
        "optimizer-before-device": left_behind(),
        "sampler-and-shuffle": message(
            lambda: DataLoader([1], shuffle=True, sampler=SequentialSampler([1]))
        ),
        "torch-save-on-xla": saved(),
        "load-to-xla": message(load),
        "changing-shape": list(ones[ones > 0].shape),
        "numpy": message(ones.numpy),
        "missing": [n for n in ("get_ordinal", "xrt_world_size") if not hasattr(xm, n)],
        "untied-weights": tied(),
        "torch-checkpoint": message(lambda: checkpointed(True)),
        "torch-checkpoint without reentry": message(lambda: checkpointed(False)),
        "checkpoint of torch_xla": message(checkpointed_by_xla),
        "frozen-batch-norm": message(lambda: through_batch_norm(nn.BatchNorm2d(2))),
        "FrozenBatchNorm2d": message(lambda: through_batch_norm(FrozenBatchNorm2d(2))),
        "biased-variance": variance_ratio(),
        "reduce-average": message(average),
    },
    sys.stdout,
)
