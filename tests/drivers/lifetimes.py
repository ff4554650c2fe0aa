"""What of a loop is alive when: not more in a run, and under %%tpu_debug, than in Python alone.

`CELL` is a notebook's cell, and a script without tpunb.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.drivers.kernel import kernel

CELL = '''
import gc
import json
import time
import weakref
from collections import Counter

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

DATA = TensorDataset(torch.arange(96, dtype=torch.float32).reshape(24, 4))


class Alive:
    """Weak references to what the steps of a loop have made, and what of it was alive when.

    In a run and under debug: what more was alive than in Python alone, where `expected` is from.
    """

    expected = None
    everything = []
    patience = 10.0

    def __init__(self):
        self.made, self.seen, self.step = [], [], 0

    def add(self, name, value):
        refs = [weakref.ref(value)]
        if isinstance(value, torch.Tensor) and value.device.type != "xla":
            storage = StorageWeakRef(value.untyped_storage())
            refs.append(lambda: None if storage.expired() else storage)
        self.made.append((self.step, name, refs))
        self.everything.append((name, refs))

    def alive(self):
        alive = [(step, name) for step, name, refs in self.made if is_alive(refs)]
        return Counter(f"{name} of {self.step - step} steps ago" for step, name in alive)

    def look(self, when):
        if self.expected is None:
            self.seen.append(list(self.alive().elements()))
            return
        # Threads of gloo and of torch_xla's loader let go of a tensor some time after.
        expected = Counter(next(self.expected))
        while (more := self.alive() - expected) and Alive.patience > 0:
            time.sleep(0.01)
            Alive.patience -= 0.01
        self.seen += [f"step {self.step}, {when}: {each}" for each in more.elements()]


def is_alive(refs):
    return any(ref() is not None for ref in refs)


def left():
    gc.collect()
    return [name for name, refs in Alive.everything if is_alive(refs)]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to(DEVICE)


def batches():
    return map(torch.clone, DATA.tensors[0].split(4))


def in_a_loop(given, before=None, average=None, compute=None):
    alive = Alive()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in given:
        alive.step += 1
        alive.add("batch", batch)
        x = batch.to(DEVICE, copy=True)
        del batch
        alive.add("x", x)
        alive.look("batch deleted")
        hidden = model[1](model[0](x))
        out = model[2](hidden) if compute is None else compute(lambda: model[2](hidden))
        loss = out.float().square().mean()
        for name, value in (("hidden", hidden), ("out", out), ("loss", loss)):
            alive.add(name, value)
        del name, value
        if before is not None:
            before(alive.step, loss)
        loss.backward()
        alive.add("gradient", model[0].weight.grad)
        if average is not None:
            average([p.grad for p in model.parameters()])
        alive.look("backward")
        optimizer.step()
        end_step()
        alive.look("step")
        optimizer.zero_grad()
        del hidden, out
        alive.look("out deleted")
        del x, loss
        alive.look("all deleted")
    return alive.seen


def bare():
    return in_a_loop(batches())


def averaged():
    return in_a_loop(batches(), average=average)


def logged():
    return in_a_loop(batches(), before=lambda step, loss: tools.log(step, loss=loss))


def tracked():
    return in_a_loop(tools.track(batches(), total=6))


def loaded():
    return in_a_loop(map(lambda batch: batch[0], loader(DataLoader(DATA, 4))))


def sharded():
    return in_a_loop(map(lambda batch: batch[0], tools.shard(DATA, 2)))


class Stream(IterableDataset):
    def __iter__(self):
        return map(torch.clone, DATA.tensors[0])


def streamed():
    return in_a_loop(tools.shard_stream(Stream(), 2))


def positioned():
    return in_a_loop(tools.position(batches))


def autocast():
    def compute(function):
        with tools.bf16():
            return function()

    return in_a_loop(batches(), compute=compute)


def called_back():
    return in_a_loop(tools.called_back(batches()), lambda step, loss: tools.log(step, loss=loss))


def accumulated():
    alive = Alive()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    backward = tools.accumulate(optimizer, 2)
    for alive.step, x in enumerate(map(lambda each: each.to(DEVICE), batches()), 1):
        out = model(x)
        losses = out.square()
        alive.add("out", out)
        alive.add("losses", losses)
        update = backward(losses)
        del losses, out, update
        alive.look("deleted")
    for value in (model, optimizer, *model.parameters()):
        alive.add(type(value).__name__, value)
    del value, backward
    model(x).mean().backward()  # hooks on the gradients are called, after Accumulation has gone
    end_step()
    alive.look("trained on")
    del model, optimizer
    alive.look("all deleted")
    return alive.seen


def models():
    alive = Alive()
    kept = []
    for alive.step in range(1, 4):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scheduled = torch.optim.Adam(model.parameters(), lr=1e-4)
        # A hook that holds the model: only the garbage collector frees it.
        if alive.step == 2:
            model[0].weight.register_hook(lambda gradient, model=model: None)
        for value in (model, model[0], optimizer, scheduled, *model.parameters()):
            alive.add(type(value).__name__, value)
        del value
        for _ in range(2):
            for each in (optimizer, scheduled):
                each.zero_grad()
                model(DATA.tensors[0].to(DEVICE)).mean().backward()
                each.step()
                end_step()
        del each
        alive.look("trained")
        del optimizer, scheduled
        alive.look("optimizers deleted")
        del model
        alive.look("all deleted")
        gc.collect()
        alive.look("collected")
    return alive.seen


CASES = (
    bare, averaged, logged, tracked, loaded, sharded, streamed, positioned, autocast, called_back,
    accumulated, models,
)


def look_at_all(expected):
    gc.collect()
    gc.disable()  # what is in a cycle stays until it is collected: at the same time
    try:
        seen = {}
        for case in CASES:
            Alive.expected = iter(expected[case.__name__]) if expected else None
            seen[case.__name__] = case()
        return seen
    finally:
        gc.enable()
'''
CASES = tuple(CELL.partition("\nCASES = (")[2].partition(")")[0].replace(",", " ").split())

PLAIN = """
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

def plain_accumulation(optimizer, every):
    def backward(losses):
        losses.mean().backward()
        end_step()

    return backward

tools = SimpleNamespace(
    log=lambda *args, **values: None,
    track=lambda given, total: given,
    shard=lambda data, size: DataLoader(data, size, sampler=range(12)),
    shard_stream=lambda data, size: DataLoader(data, size),
    position=lambda make: make(),
    bf16=lambda: torch.autocast(torch.device(DEVICE).type, torch.bfloat16),
    called_back=lambda given: given,
    accumulate=plain_accumulation,
)
"""
TOOLS = """
from types import SimpleNamespace

import tpunb
from torch.utils.data import DataLoader
from tpunb.training import Accumulation, Position, bf16, shard

def called_back(given):
    tpunb.on_log(lambda values, step: None)
    return given

class Batches:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return iter(self.make())

    def __len__(self):
        return 6

tools = SimpleNamespace(
    log=tpunb.log,
    track=tpunb.track,
    shard=lambda data, size: shard(data, size, remainder="drop"),
    shard_stream=lambda data, size: shard(DataLoader(data, size), remainder="repeat"),
    position=lambda make: iter(Position(Batches(make))),
    bf16=bf16,
    called_back=called_back,
    accumulate=lambda optimizer, every: Accumulation(optimizer, every).backward,
)
"""
STACKS = {
    "xla": """
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed.parallel_loader import MpDeviceLoader

DEVICE = "xla"

def end_step():
    torch_xla.sync()

def average(gradients):
    xm.all_reduce("sum", gradients, scale=0.5)

def loader(batches):
    return MpDeviceLoader(batches, torch_xla.device())
""",
    "torch": """
import torch.distributed as dist

DEVICE, GROUP = "cpu", "gloo"

def end_step():
    pass

def average(gradients):
    if not dist.is_initialized():
        dist.init_process_group(GROUP)
    for each in gradients:
        dist.all_reduce(each)

def loader(batches):
    return batches
""",
}
STACKS["torchtpu"] = STACKS["torch"].replace('"cpu", "gloo"', '"tpu", "tpu_dist"')
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

Seen = dict[str, dict[str, list[str]]]
"""By where, a run or %%tpu_debug, and case: what was alive for longer than in Python alone."""


def without_tpunb(backend: str, folder: Path) -> dict[str, list[list[str]]]:
    """What Python alone sees: without a TPU, the CPU instead of TorchTPU."""
    stack = STACKS["torch" if backend == "torchtpu" else backend]
    script = folder / "alone.py"
    script.write_text(f"{stack}\n{PLAIN}\n{CELL}\nprint(json.dumps(look_at_all(None)))")
    env = {**os.environ, **ALONE, "PJRT_DEVICE": "CPU"}
    made = subprocess.run(
        [sys.executable, str(script)], env=env, check=True, capture_output=True, text=True
    )
    return dict(json.loads(made.stdout.splitlines()[-1]))


_REPORTED = ("Sequential", "Linear", "SGD", "Adam", "Parameter")


def seen(backend: str, folder: Path) -> Seen:
    """What was alive for longer than in Python alone, in a rank of a run and under %%tpu_debug.

    %%tpu_debug reports on models and optimizers at its end, so only that counts for them.
    """
    alone = without_tpunb(backend, folder)
    with kernel(folder) as made:
        made.run(f"%load_ext tpunb\n%tpu_setup --cores 2 --backend {backend}").good()
        made.run(f"{STACKS[backend]}\nalone = {alone}").good()
        made.run(CELL).good()
        made.run(TOOLS).good()
        made.run("%%tpu_train --returns seen\nseen = look_at_all(alone)").good()
        run = made.value("seen")
        made.run(PLAIN).good()
        made.run("%%tpu_debug\nseen = look_at_all(alone)").good()
        debug = made.value("seen")
        debug["after the cell"] = made.value("left()")
    for case in CASES:
        words = {each: each.partition(": ")[2].split()[0] for each in debug[case]}
        debug[case] = [each for each, name in words.items() if name not in _REPORTED]
    return {"run": run, "debug": debug}
