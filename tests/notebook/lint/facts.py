"""Tests lint's claims about torch and torch_xla on the CPU; prints one JSON object."""

import io
import json
import os
import sys
import warnings

os.environ["PJRT_DEVICE"] = "CPU"
import torch
import torch_xla
from torch import nn

warnings.simplefilter("ignore")
device = torch_xla.device()
ones = torch.ones(2, 2, device=device)


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


json.dump(
    {
        "optimizer-before-device": left_behind(),
        "torch-save-on-xla": saved(),
        "changing-shape": list(ones[ones > 0].shape),
    },
    sys.stdout,
)
