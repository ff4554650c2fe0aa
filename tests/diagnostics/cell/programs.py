"""Small programs with planted faults, and clean ones: cells under %%tpu_debug.

`#! kind` marks each line that the report must name, with the kind of the finding. Any finding at a
line without a mark is a false alarm.
"""

from __future__ import annotations

PRELUDE = """\
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import tpunb

device = torch_xla.device()
torch.manual_seed(0)

def make(optimizer=torch.optim.SGD, lr=0.01):
    model = nn.Sequential(nn.Linear(6, 2)).to(device)
    return model, optimizer(model.parameters(), lr=lr)

def rows(n=16):
    return torch.randn(n, 6)
"""

TITLES = {
    "recompiled": r"recompiled at",
    "fallback": r"ran on the CPU",
    "read": r"reads a value from the device",
    "gradients": r"no gradient at any step",
    "device": r"on the CPU, not on the XLA device|the optimizer changes .* on the CPU",
    "nan": r"NaN or infinity",
    "graph": r"steps without torch_xla.sync",
    "reduction": r"gradients are not reduced",
}
"""Patterns that distinguish the titles of each kind of finding."""


def _loop(inside: str, before: str = "", steps: int = 6) -> str:
    """A training loop; `inside` computes `loss` from `model` and `step`."""
    body = "\n".join("    " + line for line in inside.splitlines())
    return f"model, opt = make()\n{before}for step in range({steps}):\n{body}\n{_update()}"


def _update(mark: str = "") -> str:
    """The end of a loop's body; `mark`: the finding at its optimizer step."""
    marked = f"  #! {mark}" if mark else ""
    return (
        f"    opt.zero_grad()\n    loss.backward()\n    xm.optimizer_step(opt){marked}\n"
        "    torch_xla.sync()\n"
    )


FAULTY: dict[str, str] = {
    # -- a batch of another shape
    "the last batch of an epoch": _loop(
        "x = batches[step % 3].to(device)  #! recompiled\nloss = model(x).square().mean()",
        before="batches = rows(40).split(16)\n",
    ),
    "sequences as long as they come": _loop(
        "x = torch.randn(16, 3 + step, 6)\n"
        "x = x.to(device)  #! recompiled\n"
        "loss = model(x).square().mean()"
    ),
    "the last batch of a device loader": """\
model, opt = make()
data = DataLoader(TensorDataset(rows(40)), batch_size=16)
for epoch in range(2):
    for x, in pl.MpDeviceLoader(data, device):
        loss = model(x).square().mean()  #! recompiled
        opt.zero_grad()
        loss.backward()
        xm.optimizer_step(opt)
""",
    "a buffer that grows": _loop(
        "seen = torch.cat([seen, x])  #! recompiled\nloss = model(seen[-16:]).square().mean()",
        before="x = seen = rows().to(device)\n",
    ),
    # -- another dtype
    "labels of another type": _loop(
        "kind = torch.float32 if step < 3 else torch.int32\n"
        "y = torch.ones(16, 2, dtype=kind).to(device)  #! recompiled\n"
        "loss = (model(x) - y).square().mean()",
        before="x = rows().to(device)\n",
    ),
    # -- results that are kept at some steps only
    "a loss in a list now and then": _loop(
        "x = rows(11).to(device)\nloss = model(x).square().mean()\n"
        "if step > 3:\n    kept.append(loss)",
        before="kept = []\n",
    ).replace("torch_xla.sync()", "loss = None\n    torch_xla.sync()  #! recompiled"),
    # -- a constant of the program
    "an index that counts": _loop(
        "loss = model(data[step]).square().mean()  #! recompiled",
        before="data = torch.randn(6, 16, 6).to(device)\n",
    ),
    "a power that grows": _loop(
        "out = model(x)\nloss = (out ** (step + 2)).mean()  #! recompiled",
        before="x = rows().to(device)\n",
    ),
    # -- a branch
    "a loss at some steps": _loop(
        "out = model(x)\nloss = out.square().mean()\n"
        "if step % 4 == 3:  #! recompiled\n    loss = loss + out.abs().mean()",
        before="x = rows().to(device)\n",
    ),
    "a branch in a function": """\
def loss_of(out, late):
    if late:  #! recompiled
        return out.abs().mean()
    return out.square().mean()

model, opt = make()
x = rows().to(device)
for step in range(6):
    loss = loss_of(model(x), step > 3)
"""
    + _update(),
    "a loop of another length": _loop(
        "out = model(x)\nfor _ in range(1 + step // 3):  #! recompiled\n    out = out * 0.5\n"
        "loss = out.square().mean()",
        before="x = rows().to(device)\n",
    ),
    # -- shapes that depend on the data, which the host must be asked for
    "a boolean index": _loop(
        "x = rows().to(device)\nout = model(x)\n"
        "kept = out.detach()\nkept = kept[kept > 0]  #! recompiled fallback\n"
        "loss = out.square().mean() + kept.sum()",
    ),
    # -- operators that XLA does not have
    "eigenvalues": _loop(
        "x = rows().to(device)\nloss = model(x).square().mean()\n"
        "size = torch.linalg.eigvals(x.T @ x)  #! fallback"
    ),
    "in a module's forward": """\
class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x.detach()) + x  #! fallback

model, opt = make()
model.append(Bessel())
for step in range(6):
    x = rows().to(device)
    loss = model(x).square().mean()
"""
    + _update(),
    # -- values that are read at every step
    "item": _loop("x = rows().to(device)\nloss = model(x).square().mean()")
    + "    total = loss.item()  #! read\n",
    "a condition": _loop("x = rows().to(device)\nloss = model(x).square().mean()")
    + "    if loss > 100:  #! read\n        break\n",
    "an f-string": _loop("x = rows().to(device)\nloss = model(x).square().mean()")
    + '    text = f"{loss:.3f}"  #! read\n',
    "cpu in a function": """\
def note(loss):
    history.append(loss.detach().cpu())  #! read

history = []
"""
    + _loop("x = rows().to(device)\nloss = model(x).square().mean()")
    + "    note(loss)\n",
    "in what predict calls": """\
from tpunb.training import predict

def step(batch):
    out = model(batch[0])
    print(out.sum().item())  #! read
    return out

model, opt = make()
predict(model, TensorDataset(rows(100)), 16, step=step)
""",
    # -- gradients
    "a layer that is not used": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x):
        return self.used(x)

model = Net().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(rows().to(device)).square().mean()
"""
    + _update("gradients"),
    "detached too early": """\
model, opt = make()
head = nn.Linear(2, 1).to(device)
opt.add_param_group({"params": head.parameters()})
for step in range(4):
    features = model(rows().to(device)).detach()
    loss = head(features).square().mean()
"""
    + _update("gradients"),
    # -- parameters that did not move
    "an optimizer made too early": """\
model = nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
model.to(device)
for step in range(4):
    loss = model(rows().to(device)).square().mean()
"""
    + _update("device"),
    "a model that never moved": """\
model = nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    loss = model(rows()).square().mean()
"""
    + _update("device"),
    "a weight beside the model": """\
model, opt = make()
scale = nn.Parameter(torch.ones(1))
opt.add_param_group({"params": [scale]})
for step in range(4):
    loss = (model(rows().to(device)) * scale.to(device)).square().mean()
"""
    + _update("device"),
    # -- gradients that stay on their core
    "the optimizer's own step": """\
model, opt = make()
for step in range(4):
    loss = model(rows().to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  #! reduction
    torch_xla.sync()
""",
    "one of two optimizers": """\
model, opt = make()
other, second = make(torch.optim.Adam)
for step in range(4):
    x = rows().to(device)
    loss = model(x).square().mean() + other(x).square().mean()
    opt.zero_grad()
    second.zero_grad()
    loss.backward()
    xm.optimizer_step(opt)
    second.step()  #! reduction
    torch_xla.sync()
""",
    # -- programs that never end
    "no sync": """\
model, opt = make()
for step in range(6):
    loss = model(rows().to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    xm.optimizer_step(opt)  #! graph
""",
}

NOT_FINITE: dict[str, str] = {
    "a logarithm of 0 in a module": """\
class Log(nn.Module):
    def forward(self, x):
        return torch.log(x.abs() * self.scale)

log = Log()
log.scale = 1.0
model, opt = make()
model.append(log)
for step in range(5):
    log.scale = 1.0 if step < 2 else 0.0
    out = model(rows().to(device))  #! nan
    loss = out.square().mean()
"""
    + _update(),
    "a loss": _loop("x = rows().to(device)\nloss = model(x).square().mean() / (3 - step)").replace(
        "loss.backward()", "loss.backward()  #! nan"
    ),
    "a gradient": """\
model, opt = make()
for step in range(4):
    out = model(rows().to(device) * 0)
    loss = (out - out.detach()).abs().sqrt().mean()
"""
    + _update("nan"),
    "the input of the model": _loop(
        "x = rows()\nif step == 3:\n    x[0, 0] = float('nan')\n"
        "loss = model(x.to(device)).square().mean()  #! nan"
    ),
}
"""Programs for --nan; only that finding is checked."""

CLEAN: dict[str, str] = {
    "a model that is moved at every step": _loop(
        "model.to(device)\nloss = model(rows().to(device)).square().mean()",
    ),
    "a model that goes to the CPU and back": _loop(
        "loss = model(rows().to(device)).square().mean()\n"
        "if step == 3:\n    model.cpu()\n    model.to(device)",
    ),
    "gradients that add up": """\
model, opt = make()
for step in range(6):
    loss = model(rows().to(device)).square().mean()
    loss.backward()
    xm.optimizer_step(opt)
    torch_xla.sync()
""",
    "a loop": _loop("x = rows().to(device)\nloss = model(x).square().mean()", steps=12),
    "Adam, a schedule, dropout": """\
model, opt = make(torch.optim.AdamW)
model.append(nn.Dropout(0.1))
plan = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
for step in range(12):
    loss = model(rows().to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    xm.optimizer_step(opt)
    plan.step()
    torch_xla.sync()
""",
    "accumulation": """\
model, opt = make()
opt.zero_grad()
for step in range(12):
    loss = model(rows().to(device)).square().mean() / 4
    loss.backward()
    if step % 4 == 3:
        xm.optimizer_step(opt)
        opt.zero_grad()
    torch_xla.sync()
""",
    "a device loader and tpunb.log": """\
model, opt = make()
data = DataLoader(TensorDataset(rows(64)), batch_size=16, drop_last=True)
for epoch in range(3):
    for x, in tpunb.track(pl.MpDeviceLoader(data, device)):
        loss = model(x).square().mean()
        opt.zero_grad()
        loss.backward()
        xm.optimizer_step(opt)
        tpunb.log(loss=loss)
""",
    "a sum on the device": _loop(
        "x = rows().to(device)\nloss = model(x).square().mean()\ntotal += loss.detach()",
        before="total = torch.zeros((), device=device)\n",
        steps=8,
    )
    + "print(total.item())\n",
    "read now and then": _loop("x = rows().to(device)\nloss = model(x).square().mean()", steps=20)
    + "    if step % 10 == 9:\n        print(loss.item())\n",
    "training and evaluation": """\
def train(index):
    model, opt = make()
    for epoch in range(3):
        model.train()
        for step in range(4):
            loss = model(rows().to(device)).square().mean()
            opt.zero_grad()
            loss.backward()
            xm.optimizer_step(opt)
            torch_xla.sync()
        model.eval()
        wrong = torch.zeros((), device=device)
        with torch.no_grad():
            for step in range(3):
                wrong += model(rows().to(device)).square().sum()
                torch_xla.sync()
        print(wrong.item())

torch_xla.launch(train)
""",
    "torch.compile": """\
model, opt = make()
fast = torch.compile(model, backend="openxla")
for step in range(6):
    with torch.no_grad():
        out = fast(rows().to(device))
    torch_xla.sync()
""",
    "a step closure": """\
model, opt = make()
for step in range(8):
    loss = model(rows().to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    xm.optimizer_step(opt)
    xm.add_step_closure(lambda loss: print(loss.item()), args=(loss,))
    torch_xla.sync()
""",
    "predict, means and checkpoints": """\
from tpunb.training import MaskedMean, predict, shard

model, opt = make()
opt.zero_grad()
model(rows().to(device)).square().mean().backward()
xm.optimizer_step(opt)
torch_xla.sync()
data = TensorDataset(rows(100))
right = MaskedMean()
with torch.no_grad():
    for (x,), mask in shard(data, 16):
        right.add(model(x.to(device)).square().sum(1), mask.to(device))
        torch_xla.sync()
tpunb.log(mean=right.mean())
for number in range(4):
    tpunb.save({"model": model, "optimizer": opt}, number)
assert len(predict(model, data, 16)) == 100
""",
    "nothing of XLA": "print(sum(range(10)))\n",
}
