"""Notebooks in the style of PyTorch/XLA's examples, Kaggle and Hugging Face, for migrations.

Each trains a few steps on made-up data, and leaves its losses in the list `losses`.
"""

from __future__ import annotations

DATA = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
losses = []
"""

SINGLE_CORE = [
    DATA,
    """\
!pip install cloud-tpu-client torch_xla==2.5
import os
os.environ["PJRT_DEVICE"] = "TPU"
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
""",
    """\
device = xm.xla_device()
model = nn.Linear(8, 3).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in DataLoader(data, batch_size=16):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    xm.optimizer_step(optimizer, barrier=True)
    xm.mark_step()
    losses.append(loss.item())
print(met.metrics_report())
""",
]

SPAWN = [
    DATA,
    """\
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.utils.utils as unused
import numpy as np
""",
    """\
FLAGS = {"epochs": 2, "lr": 0.05}
SERIAL_EXEC = xmp.MpSerialExecutor()
WRAPPED_MODEL = xmp.MpModelWrapper(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))


def train_loop_fn(loader, model, optimizer):
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        xm.optimizer_step(optimizer)
        losses.append(loss.item())
        xm.master_print(f"[{xm.get_ordinal()}] {step}: {loss.item():.3f}", flush=True)


def test_loop_fn(loader, model):
    correct = total = 0
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            correct += (model(inputs).argmax(1) == targets).sum().item()
            total += len(targets)
    model.train()
    return correct / total


def _mp_fn(rank, flags):
    dataset = SERIAL_EXEC.run(lambda: data)
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=xm.xrt_world_size(), rank=xm.get_ordinal(), shuffle=False)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    device = xm.xla_device()
    model = WRAPPED_MODEL.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=flags["lr"] * xm.xrt_world_size())
    for epoch in range(flags["epochs"]):
        para_loader = pl.ParallelLoader(loader, [device])
        train_loop_fn(para_loader.per_device_loader(device), model, optimizer)
        para_loader = pl.ParallelLoader(loader, [device])
        accuracy = test_loop_fn(para_loader.per_device_loader(device), model)
        accuracy = xm.mesh_reduce("accuracy", accuracy, np.mean)
        xm.master_print("accuracy", accuracy)
    xm.rendezvous("done")
    xm.save(model.state_dict(), "model.pt")
""",
    "xmp.spawn(_mp_fn, args=(FLAGS,), nprocs=8, start_method='fork')",
]

RESNET = [
    DATA,
    """\
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.parallel_loader import MpDeviceLoader
""",
    """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x[:, None]))).flatten(1))


def train(index):
    torch.manual_seed(1)
    device = torch_xla.device()
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_loader = DataLoader(data, batch_size=16, drop_last=True)
    train_device_loader = MpDeviceLoader(train_loader, device)
    for epoch in range(2):
        for step, (x, y) in enumerate(train_device_loader):
            with torch_xla.step():
                # one step
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                xm.optimizer_step(optimizer)
            xm.add_step_closure(lambda value: losses.append(value.item()), args=(loss,))
        if xm.is_master_ordinal():
            torch.save({"model": model.state_dict(), "world": xr.world_size()}, "net.pt")
    total = xm.all_reduce(xm.REDUCE_SUM, torch.ones(1, device=device), scale=1.0 / xr.world_size())
    assert total.item() == 1
""",
    "torch_xla.launch(train, args=())",
]

FINE_TUNING = [
    DATA,
    """\
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.xla_multiprocessing as xmp
from torch_xla.amp.syncfree import AdamW
""",
    """\
def collate(rows):
    x, y = zip(*rows)
    return {"inputs": torch.stack(x), "labels": torch.stack(y)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, inputs, labels):
        return F.cross_entropy(self.head(torch.tanh(self.body(inputs))), labels)


def finetune(rank):
    torch.manual_seed(2)
    device = xm.xla_device()
    model = Model().to(device)
    optimizer = AdamW(model.parameters(), lr=5e-3)
    loader = pl.MpDeviceLoader(DataLoader(data, 16, collate_fn=collate), device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for batch in loader:
        loss = model(**batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        xm.optimizer_step(optimizer)
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if xm.is_master_ordinal(local=False):
        xm.save({"weights": model.state_dict(), "steps": len(loader)}, "tuned.pt")
""",
    "if __name__ == '__main__':\n    xmp.spawn(finetune, nprocs=1)",
]

GAN = [
    DATA,
    """\
import torch_xla, torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
""",
    """\
%%tpu_train --cores 1
device = torch_xla.device()
torch.manual_seed(3)
netG = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
netD = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
optD = torch.optim.Adam(netD.parameters(), lr=2e-3)
optG = torch.optim.Adam(netG.parameters(), lr=2e-3)
noise = torch.randn(64, 4)
for number, batch in enumerate(pl.MpDeviceLoader(DataLoader(data, 16), device)):
    real = batch[0]
    fake = netG(noise[16 * number:16 * number + 16].to(device))
    netD.zero_grad()
    ones, zeros = torch.ones(16, 1, device=device), torch.zeros(16, 1, device=device)
    lossD = F.binary_cross_entropy_with_logits(netD(real), ones)
    lossD = lossD + F.binary_cross_entropy_with_logits(netD(fake.detach()), zeros)
    lossD.backward()
    xm.optimizer_step(optD)
    netG.zero_grad()
    lossG = F.binary_cross_entropy_with_logits(netD(fake), ones)
    lossG.backward()
    xm.optimizer_step(optG)
    torch_xla.sync()
    losses += [lossD.item(), lossG.item()]
print(xm.xla_device_hw(device), flush=True)
""",
]

ACCUMULATION = [
    DATA,
    "import torch_xla.core.xla_model as xm\nimport torch_xla.runtime as xr",
    """\
%%tpu_train --cores 1 --returns model
device = xm.xla_device()
torch.manual_seed(4)
model = nn.Linear(8, 3).to(device)
xm.broadcast_master_param(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x, y) in enumerate(DataLoader(data, 8)):
    loss = F.cross_entropy(model(x.to(device)), y.to(device)) / 2
    loss.backward()
    if number % 2:
        gradients = xm._fetch_gradients(optimizer)
        xm.all_reduce("sum", gradients, scale=1.0 / xr.world_size())
        optimizer.step()
        optimizer.zero_grad()
        xm.mark_step()
    losses.append(loss.item())
every = xm.all_gather(torch.full((2,), float(losses[-1]), device=device))
assert every.shape == (2 * xr.world_size(),)
""",
]

DDP = [
    DATA,
    """\
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.xla_backend
from torch.nn.parallel import DistributedDataParallel as DDP
""",
    """\
def run(index):
    dist.init_process_group("xla", init_method="xla://")
    torch.manual_seed(5)
    device = torch.device("xla")
    model = DDP(nn.Linear(8, 3).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, 16):
        optimizer.zero_grad()
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=False):
            loss = F.cross_entropy(model(x.to("xla")), y.to(device))
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.item())
""",
    "torch_xla.launch(run, start_method='fork')",
]

BOTH_HARDWARES = [
    DATA,
    """\
try:
    import torch_xla
    import torch_xla.core.xla_model as xm
    HAS_TPU = True
except ImportError:
    HAS_TPU = False
""",
    """\
if HAS_TPU:
    device = xm.xla_device()
else:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = nn.Linear(8, 3).to(device)
adam = torch.optim.Adam(net.parameters(), 0.01)
for x, y in DataLoader(data, 32):
    loss = F.cross_entropy(net(x.to(device)), y.to(device))
    adam.zero_grad()
    loss.backward()
    if HAS_TPU:
        xm.optimizer_step(adam, barrier=True)
    else:
        adam.step()
    losses.append(loss.item())
""",
]

COMPLETE = {
    "single core": SINGLE_CORE,
    "xmp.spawn with ParallelLoader": SPAWN,
    "resnet with MpDeviceLoader": RESNET,
    "fine-tuning with dicts": FINE_TUNING,
    "a GAN with two optimizers": GAN,
    "gradient accumulation": ACCUMULATION,
    "DistributedDataParallel": DDP,
    "TPU or GPU": BOTH_HARDWARES,
}
"""Notebooks that are rewritten completely."""

LOSSES = {
    "single core": [1.318178, 1.371342, 1.177758, 1.3141],
    "xmp.spawn with ParallelLoader": [
        1.186733,
        1.049764,
        1.083446,
        1.15492,
        1.028012,
        0.826582,
        0.949606,
        1.035454,
    ],
    "resnet with MpDeviceLoader": [
        1.140111,
        0.994057,
        1.081707,
        1.136664,
        0.971784,
        0.797673,
        1.051477,
        1.064953,
    ],
    "fine-tuning with dicts": [1.125849, 1.171969, 1.008782, 1.213207],
    "a GAN with two optimizers": [
        1.430506,
        0.790376,
        1.389413,
        0.780671,
        1.452578,
        0.773334,
        1.40483,
        0.779022,
    ],
    "gradient accumulation": [
        0.570299,
        0.65011,
        0.508952,
        0.546125,
        0.643059,
        0.660594,
        0.456636,
        0.699747,
    ],
    "DistributedDataParallel": [1.567319, 1.125836, 1.089051, 1.321282],
    "TPU or GPU": [1.3598, 1.287162],
}
"""What the notebooks of COMPLETE leave in `losses` on one core, with torch_xla 2.9 on the CPU."""

SPMD = [
    DATA,
    """\
import numpy as np
import torch_xla
import torch_xla.runtime as xr
import torch_xla.distributed.spmd as xs
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("data",))
x = torch.ones(4, 4).to(torch_xla.device())
xs.mark_sharding(x, mesh, ("data", None))
torch_xla.sync()
""",
]
FSDP = [
    DATA,
    """\
import torch_xla.core.xla_model as xm
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
model = FSDP(nn.Linear(8, 3).to(xm.xla_device()))
pairs = [[0, 1], [1, 0]]
y = xm.collective_permute(x, pairs)
xm.all_reduce("sum", x, groups=[[0, 1]])
""",
]
INCOMPLETE = {
    "SPMD": (SPMD, ("torch_xla.runtime.use_spmd", "torch_xla.distributed.spmd.mark_sharding")),
    "FSDP": (
        FSDP,
        (
            "torch_xla.distributed.fsdp.XlaFullyShardedDataParallel",
            "torch_xla.core.xla_model.collective_permute",
            "torch_xla.core.xla_model.all_reduce",
        ),
    ),
}
"""Notebooks of which names are left, with some of these names."""
