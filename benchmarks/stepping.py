"""A rank that measures the cost of tpunb in a training step: a script for torchrun.

    torchrun --nproc-per-node=1 stepping.py ROUNDS SAMPLES

Prints a line of JSON: for each way, a list of processor seconds of a step for each round.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.inferring import BATCH, CLASSES, Times, make_model
from tpunb.backends.xla import counters
from tpunb.runs.cell_lines import CellLines
from tpunb.runs.spec import RunSpec
from tpunb.training import Accumulation, masked_loss, shard
from tpunb.worker.recompiles import StepMonitor
from tpunb.worker.stepped import SteppedModels

PIECES = 4
_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]


def stepping(rounds: int, samples: int) -> Times:
    """Time steps in plain PyTorch, with the check that a run makes at each, and with helpers."""
    data = TensorDataset(torch.randn(samples, 64), torch.randint(CLASSES, (samples,)))
    model = make_model(256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    plain: DataLoader[list[torch.Tensor]] = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    dropping, padding = shard(plain, remainder="drop"), shard(plain)

    def step(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        xm.optimizer_step(optimizer)

    def losses(batch: Iterable[torch.Tensor], reduction: str) -> torch.Tensor:
        x, y = (part.to("xla") for part in batch)
        return nn.functional.cross_entropy(model(x), y, reduction=reduction)

    def bare() -> None:
        for batch in plain:
            loss = losses(batch, "mean")
            step(loss)
            torch_xla.sync(wait=True)

    def bare_masked() -> None:
        mask = torch.ones(BATCH, dtype=torch.bool)
        for batch in plain:
            counts = mask.clone().to("xla")
            step((losses(batch, "none") * counts).sum() / counts.sum())
            torch_xla.sync(wait=True)

    def dropped() -> None:
        for batch in dropping:
            loss = losses(batch, "mean")
            step(loss)
            torch_xla.sync(wait=True)

    def masked() -> None:
        for batch, mask in padding:
            step(masked_loss(losses(batch, "none"), mask.to("xla")))
            torch_xla.sync(wait=True)

    def bare_pieces() -> None:
        for number, batch in enumerate(plain, 1):
            (losses(batch, "mean") / PIECES).backward()
            if number % PIECES == 0:
                xm.optimizer_step(optimizer)
                optimizer.zero_grad()
            torch_xla.sync(wait=True)

    accumulation = Accumulation(torch.optim.SGD(model.parameters(), lr=0.01), PIECES)

    def accumulated() -> None:
        for batch in plain:
            accumulation.backward(losses(batch, "none"))
            xm.wait_device_ops()
        accumulation.finish()

    marker = _XLAC._xla_step_marker
    folder = tempfile.TemporaryDirectory()
    recompiles = Path(folder.name) / "recompiles.jsonl"
    spec = RunSpec("", "", 1, "CPU", "", (), ())
    StepMonitor(CellLines(Path(__file__), spec), recompiles, counters).install()
    looking = _XLAC._xla_step_marker

    def looked() -> None:
        _XLAC._xla_step_marker = looking
        bare()
        _XLAC._xla_step_marker = marker

    _XLAC._xla_step_marker = marker
    models = SteppedModels()

    def noted() -> None:
        hook = register_optimizer_step_post_hook(models.stepped)
        bare()
        hook.remove()

    ways = {
        "bare": (bare, plain),
        "looked": (looked, plain),
        "noted": (noted, plain),
        "dropped": (dropped, dropping),
        "bare masked": (bare_masked, plain),
        "masked": (masked, padding),
        "bare pieces": (bare_pieces, plain),
        "accumulated": (accumulated, plain),
    }
    found: Times = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 1):  # the first compiles
        for loader in (sampler, dropping, padding):
            loader.set_epoch(number)
        for name in order:
            work, loader = ways[name]
            began = time.process_time()  # excludes other work of the machine
            work()
            seconds = time.process_time() - began
            if number:
                found[name].append([seconds / len(loader)])
        order.reverse()  # so that a drift of the machine affects all alike
    folder.cleanup()
    return found


if __name__ == "__main__":
    print(json.dumps(stepping(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
