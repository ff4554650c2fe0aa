"""Small programs for TorchTPU with planted faults, and clean ones: cells under %%tpu_debug.

`#! kind` marks each line that the report must name, as in tests/diagnostics/cell/programs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.diagnostics.cell import programs

PRELUDE = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import tpunb

device = torch.device("tpu")
torch.manual_seed(0)

def make(optimizer=torch.optim.SGD, lr=0.01):
    model = nn.Sequential(nn.Linear(6, 2)).to(device)
    return model, optimizer(model.parameters(), lr=lr)

def rows(n=16):
    return torch.randn(n, 6)
"""

TITLES = {
    "recompiled": r"^recompiled at",
    "compiled": r"torch.compile recompiled",
    "break": r"torch.compile (breaks|does not compile)",
    "read": r"reads a value from the device",
    "gap": r"is not implemented for TPUs|on TPUs",
    "gradients": r"no gradient at any step",
    "device": r"on the CPU, not on the (TPU|GPU)|the optimizer changes .* on the CPU",
    "zero_grad": r"gradients are never set to zero",
    "unchanged": r"a step changes \d+% of the values|no step changes the values",
    "optimizer": r"in no optimizer",
    "nan": r"NaN or infinity",
    "reduction": r"gradients are not reduced",
}
"""Patterns that distinguish the titles of each kind of finding."""


def _of_torch_xla(cells: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Programs for torch_xla, as TorchTPU has them."""
    return {
        name: "".join(
            line.replace("xm.optimizer_step(opt)", "opt.step()")
            for line in cells[name].splitlines(keepends=True)
            if line.strip() != "torch_xla.sync()"
        )
        for name in names
    }


def _loop(inside: str, before: str = "", steps: int = 6, after: str = "") -> str:
    """A training loop; `inside` computes `loss` from `model` and `step`."""
    body = "\n".join("    " + line for line in inside.splitlines())
    end = "".join(f"    {line}\n" for line in after.splitlines())
    return f"model, opt = make()\n{before}for step in range({steps}):\n{body}\n{_update()}{end}"


def _update(mark: str = "") -> str:
    """The end of a loop's body; `mark`: the finding at its optimizer step."""
    marked = f"  #! {mark}" if mark else ""
    return f"    opt.zero_grad()\n    loss.backward()\n    opt.step(){marked}\n"


_PLAIN = "x = rows().to(device)\nloss = model(x).square().mean()"

COMPILED: dict[str, str] = {
    "a graph break": """\
@torch.compile
def loss_of(out):
    loss = out.square().mean()
    if loss.item() > 100:  #! break read
        loss = loss * 0.5
    return loss

model, opt = make()
for step in range(4):
    loss = loss_of(model(rows().to(device)))
"""
    + _update(),
    "a print in a loop": """\
@torch.compile
def loss_of(out):
    for scale in (1.0, 0.5):
        print("scale", scale)  #! break
        out = out * scale
    return out.square().mean()

model, opt = make()
for step in range(4):
    loss = loss_of(model(rows().to(device)))
"""
    + _update(),
    "the last batch": _loop(
        "x = batches[step % 3].to(device)  #! recompiled\n"
        "loss = fast(x).square().mean()  #! compiled",
        before="fast = torch.compile(model)\nbatches = rows(40).split(16)\n",
    ),
    "always another length": """\
@torch.compile
def square(x, number):
    return (x * number).square().mean()

model, opt = make()
for step in range(12):
    out = model(rows().to(device))
    loss = square(out, step)  #! compiled
"""
    + _update(),
    "in an evaluation without steps": """\
model, opt = make()
fast = torch.compile(model)
with torch.no_grad():
    for x in rows(40).split(16):
        fast(x.to(device))  #! compiled
""",
}

FAULTY: dict[str, str] = {
    **_of_torch_xla(
        programs.FAULTY,
        [
            "the last batch of an epoch",
            "sequences as long as they come",
            "a buffer that grows",
            "labels of another type",
            "item",
            "a condition",
            "an f-string",
            "cpu in a function",
            "a layer that is not used",
            "detached too early",
            "a model that never moved",
            "a weight beside the model",
        ],
    ),
    "a boolean index": _loop(
        "x = rows().to(device)\nout = model(x)\n"
        "kept = out.detach()\nkept = kept[kept > 0]  #! recompiled\n"
        "loss = out.square().mean() + kept.sum()",
    ),
    # -- values that are read at every step
    "print": _loop(_PLAIN, after="print(loss)  #! read"),
    "tolist": _loop(_PLAIN, after="model[0].bias.tolist()  #! read"),
    "an index": _loop(
        "x = rows().to(device)\nout = model(x)\n"
        "best = names[out.sum(0).argmax()]  #! read\nloss = out.square().mean()",
        before="names = ['a', 'b']\n",
    ),
    "in what predict calls": """\
from tpunb.training import predict

def step(batch):
    out = model(batch[0])
    print(out.sum().item())
    return out

model, opt = make()
for epoch in range(3):
    loss = model(rows().to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())  #! read
""",
    "an optimizer with a closure": """\
model, _ = make()
opt = torch.optim.LBFGS(model.parameters(), max_iter=3)

def closure():
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss

x = rows().to(device)
for step in range(3):
    opt.step(closure)  #! read
""",
    # -- operators
    "smooth_l1_loss": _loop(
        "x = rows().to(device)\nloss = F.smooth_l1_loss(model(x), y)  #! gap",
        before="y = torch.zeros(16, 2, device=device)\n",
    ),
    "an operator in a module": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 2)

    def forward(self, x):
        return F.mish(self.linear(x))  #! gap

model = Net().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = model(rows().to(device)).square().mean()
"""
    + _update(),
    "multinomial": _loop(
        "x = rows().to(device)\nout = model(x)\n"
        "drawn = torch.multinomial(out.detach().softmax(1), 1)  #! gap\n"
        "loss = out.gather(1, drawn).square().mean()"
    ),
    "resizing with antialias": _loop(
        "image = F.interpolate(images, size=(4, 4), mode='bilinear', antialias=True)  #! gap\n"
        "loss = model(image.reshape(-1, 6)[:4]).square().mean()",
        before="images = torch.randn(3, 2, 8, 8, device=device)\n",
    ),
    # -- gradients
    "never zero": _loop(_PLAIN)
    .replace("    opt.zero_grad()\n", "")
    .replace("opt.step()", "opt.step()  #! zero_grad"),
    # -- parameters that do not change
    "bfloat16 weights": """\
model = nn.Sequential(nn.Linear(6, 2)).to(device, dtype=torch.bfloat16)
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(4):
    x = rows().to(device, dtype=torch.bfloat16)
    loss = model(x).square().mean()
"""
    + _update("unchanged"),
    "a learning rate of 0": """\
model, opt = make(lr=0.0)
for step in range(4):
    loss = model(rows().to(device)).square().mean()
"""
    + _update("unchanged"),
    "a head that is in no optimizer": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))

model = Net().to(device)
opt = torch.optim.SGD(model.body.parameters(), lr=0.01)
for step in range(4):
    loss = model(rows().to(device)).square().mean()
"""
    + _update("optimizer"),
    # -- gradients that stay on their core
    "no DistributedDataParallel": """\
import torch.distributed as dist

dist.init_process_group("tpu_dist")
model, opt = make()
for step in range(4):
    loss = model(rows().to(device)).square().mean()
"""
    + _update("reduction"),
    "reduce": """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("tpu_dist")
model, opt = make()
model = DistributedDataParallel(model)
for step in range(4):
    loss = model(rows().to(device)).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    total = loss.detach().clone()
    try:
        dist.reduce(total, 0)  #! gap
    except RuntimeError as error:  # TorchTPU refuses it; the cell trains on, to be reported
        print(error)
""",
}

NOT_FINITE: dict[str, str] = {
    **_of_torch_xla(programs.NOT_FINITE, list(programs.NOT_FINITE)),
    "a mask that is infinite on purpose": _loop(
        "out = model(rows().to(device))\n"
        "out = out.masked_fill(out > 9, float('-inf')).softmax(1)\n"
        "loss = (out.sum() - out.sum() + 0.9 - step / 2).sqrt()",
        steps=5,
    ).replace("loss.backward()", "loss.backward()  #! nan"),
}
"""Programs for --nan; only that finding is checked."""

CLEAN: dict[str, str] = {
    **_of_torch_xla(
        programs.CLEAN,
        [
            "a loop",
            "Adam, a schedule, dropout",
            "accumulation",
            "a sum on the device",
            "read now and then",
        ],
    ),
    "two optimizers": """\
model, opt = make()
other, second = make(torch.optim.Adam)
for step in range(6):
    x = rows().to(device)
    loss = model(x).square().mean() + other(x).square().mean()
    opt.zero_grad(set_to_none=False)
    second.zero_grad(set_to_none=False)
    loss.backward()
    opt.step()
    second.step()
""",
    "bfloat16 with autocast": _loop(
        "x = rows().to(device)\n"
        "with torch.autocast('tpu', dtype=torch.bfloat16):\n"
        "    loss = model(x).float().square().mean()"
    ),
    "a loader and tpunb.log": """\
model, opt = make()
data = DataLoader(TensorDataset(rows(64)), batch_size=16, drop_last=True)
for epoch in range(3):
    for x, in tpunb.track(data):
        loss = model(x.to(device)).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        tpunb.log(loss=loss)
""",
    "training and evaluation": """\
def train(index):
    model, opt = make()
    for epoch in range(3):
        model.train()
        for step in range(4):
            loss = model(rows().to(device)).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        wrong = torch.zeros((), device=device)
        with torch.no_grad():
            for x in rows(40).split(16):
                wrong += model(x.to(device)).square().sum()
        print(wrong.item())

train(0)
""",
    "torch.compile": """\
model, opt = make()
fast = torch.compile(model)
other = torch.compile(nn.Sequential(nn.Linear(6, 3)).to(device))
for step in range(6):
    x = rows().to(device)
    loss = fast(x).square().mean() + other(x).mean() * 0
"""
    + _update(),
    "a compiled step": """\
model, opt = make()

@torch.compile
def loss_of(x):
    return model(x).square().mean()

for step in range(6):
    loss = loss_of(rows().to(device))
"""
    + _update()
    + """\
model.eval()
with torch.no_grad():
    for step in range(3):
        loss_of(rows().to(device))
""",
    "torch.func, generators, checkpoints, hooks": """\
from torch.utils.checkpoint import checkpoint

model, opt = make()
weights = torch.func.vmap(lambda x: x.square().sum())(rows().to(device))
outputs = torch.func.vmap(model)(rows().to(device))
slope = torch.func.grad(lambda x: x.sin().sum())(rows().to(device))

def batches():
    for step in range(6):
        yield rows().to(device)

for x in batches():
    x.requires_grad_()
    x.register_hook(lambda grad: grad * 2)
    loss = checkpoint(model, x, use_reentrant=False).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
""",
    "DistributedDataParallel": """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("tpu_dist")
model, opt = make()
model = DistributedDataParallel(model)
for step in range(4):
    loss = model(rows().to(device)).square().mean()
"""
    + _update(),
    "a network with convolutions, an LSTM and attention": """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.rnn = nn.LSTM(4, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.conv(x).flatten(2).transpose(1, 2)
        x, _ = self.rnn(x)
        x, _ = self.attention(x, x, x)
        return self.head(x[:, -1])

model = Net().to(device)
opt = torch.optim.Adam(model.parameters())
for step in range(5):
    x, y = torch.randn(4, 1, 8, 8).to(device), torch.randint(0, 3, (4,)).to(device)
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
"""
    + _update(),
    "nothing of torch": "print(sum(range(10)))\n",
}

ON_CPU: dict[str, str] = {
    "values are read for nothing": _loop(_PLAIN, after="total = loss.item()\nprint(loss)"),
    "another batch, not compiled": _loop(
        "loss = model(batches[step % 3]).square().mean()", before="batches = rows(40).split(16)\n"
    ),
    "never zero": _loop(_PLAIN)
    .replace("    opt.zero_grad()\n", "")
    .replace("opt.step()", "opt.step()  #! zero_grad"),
    "no gradient": """\
model, opt = make()
head = nn.Linear(2, 1)
opt.add_param_group({"params": head.parameters()})
for step in range(4):
    loss = head(model(rows()).detach()).square().mean()
"""
    + _update("gradients"),
    "a graph break": COMPILED["a graph break"].replace("break read", "break"),
    "a function with another length": COMPILED["always another length"],
}
"""Programs with `device = torch.device("cpu")`: only some of the findings matter there."""
