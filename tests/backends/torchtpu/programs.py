"""Programs as the documentation of torch and of others shows them, as cells of a notebook.

What is changed: sizes, paths, and made data with a seed, so that losses can be compared. `DEVICE`
and `GROUP` are what the tutorials take from `torch.accelerator`, or name "cuda" and "nccl" for.
"""

from __future__ import annotations

DDP = """
# Getting Started with Distributed Data Parallel (pytorch.org/tutorials/intermediate/ddp_tutorial)
import os
import sys
import tempfile
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
import torch.multiprocessing as mp

from torch.nn.parallel import DistributedDataParallel as DDP

def setup(rank, world_size):
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = '12355'

    # initialize the process group
    dist.init_process_group(GROUP, rank=rank, world_size=world_size)

def cleanup():
    dist.destroy_process_group()

class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

torch.manual_seed(0)
inputs, targets = torch.randn(40, 10), torch.randn(40, 5)

def demo_basic(rank, world_size):
    print(f"Running basic DDP example on rank {rank}.")
    setup(rank, world_size)

    # create model and move it to the device
    torch.manual_seed(1)
    model = ToyModel().to(DEVICE)
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)

    for step in range(5):
        optimizer.zero_grad()
        outputs = ddp_model(inputs[rank::world_size].to(DEVICE))
        labels = targets[rank::world_size].to(DEVICE)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)

    cleanup()
    print(f"Finished running basic DDP example on rank {rank}.")

def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn,
             args=(world_size,),
             nprocs=world_size,
             join=True)

def demo_checkpoint(rank, world_size):
    print(f"Running DDP checkpoint example on rank {rank}.")
    setup(rank, world_size)

    model = ToyModel().to(DEVICE)
    ddp_model = DDP(model)

    CHECKPOINT_PATH = "model.checkpoint"
    if rank == 0:
        # All processes should see same parameters as they all start from same
        # random parameters and gradients are synchronized in backward passes.
        # Therefore, saving it in one process is sufficient.
        torch.save(ddp_model.state_dict(), CHECKPOINT_PATH)

    # Use a barrier() to make sure that process 1 loads the model after process
    # 0 saves it.
    dist.barrier()
    # configure map_location properly
    map_location = {f'{DEVICE}:0': f'{DEVICE}:0'}
    ddp_model.load_state_dict(
        torch.load(CHECKPOINT_PATH, map_location=map_location, weights_only=True))

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)

    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10).to(DEVICE))
    labels = torch.randn(20, 5).to(DEVICE)

    loss_fn(outputs, labels).backward()
    optimizer.step()

    # Not necessary to use a dist.barrier() to guard the file deletion below
    # as the AllReduce ops in the backward pass of DDP already served as
    # a synchronization.

    if rank == 0:
        os.remove(CHECKPOINT_PATH)

    cleanup()
    print(f"Finished running DDP checkpoint example on rank {rank}.")
"""
DDP_RUN = """
losses = []
world_size = int(os.environ["WORLD_SIZE"])
run_demo(demo_basic, world_size)
run_demo(demo_checkpoint, world_size)
"""
DDP_ALONE = """
torch.manual_seed(1)
alone, model = [], ToyModel()
optimizer = optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.zero_grad()
    loss = nn.MSELoss()(model(inputs), targets)
    loss.backward()
    optimizer.step()
    alone.append(loss.item())
"""

TENSOR_PARALLEL = """
# Large Scale Transformer model training with Tensor Parallel (TP): github.com/pytorch/examples,
# distributed/tensor_parallelism: tensor_parallel_example.py, sequence_parallel_example.py
import os
import torch
import torch.distributed as dist
import torch.nn as nn

from torch.distributed._tensor import Shard
from torch.distributed.tensor.parallel import (
    parallelize_module,
    ColwiseParallel,
    RowwiseParallel,
)
from torch.distributed.device_mesh import init_device_mesh

class ToyModel(nn.Module):
    \"\"\"MLP based model\"\"\"

    def __init__(self):
        super(ToyModel, self).__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))

lr = 0.05

def tensor_parallel(num_iters):
    device_mesh = init_device_mesh(device_type=DEVICE, mesh_shape=(int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(1)
    tp_model = ToyModel().to(DEVICE)
    tp_model = parallelize_module(
        module=tp_model,
        device_mesh=device_mesh,
        parallelize_plan={
            "in_proj": ColwiseParallel(),
            "out_proj": RowwiseParallel(),
        },
    )
    optimizer = torch.optim.AdamW(tp_model.parameters(), lr=lr, foreach=True)
    for i in range(num_iters):
        # For TP, input needs to be same across all TP ranks.
        # Setting the random seed is to mimic the behavior of dataloader.
        torch.manual_seed(i)
        inp = torch.rand(20, 10).to(DEVICE)
        output = tp_model(inp)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

def sequence_parallel(num_iters):
    device_mesh = init_device_mesh(device_type=DEVICE, mesh_shape=(int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(1)
    model = ToyModel().to(DEVICE)
    sp_model = parallelize_module(
        module=model,
        device_mesh=device_mesh,
        parallelize_plan={
            "in_proj": ColwiseParallel(input_layouts=Shard(0)),
            "out_proj": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    optimizer = torch.optim.AdamW(sp_model.parameters(), lr=lr, foreach=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    for i in range(num_iters):
        # For SP, input can be different across all ranks.
        torch.manual_seed(i)
        inp = torch.rand(20, 10)[10 * rank : 10 * (rank + 1)].to(DEVICE)
        output = sp_model(inp)
        loss = output.square().mean() / world
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        yield total.item()
"""
TENSOR_PARALLEL_RUN = """
losses = [*tensor_parallel(6), *sequence_parallel(6)]
"""
TENSOR_PARALLEL_ALONE = """
torch.manual_seed(1)
model = ToyModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
alone = []
for i in range(6):
    torch.manual_seed(i)
    loss = model(torch.rand(20, 10)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    alone.append(loss.item())
alone *= 2
"""

ACCELERATE = """
# accelerate's examples/nlp_example.py, with a linear model and made data
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed

torch.manual_seed(0)
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)

def training_function(batch_size):
    accelerator = Accelerator()
    set_seed(42)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        model.train()
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield accelerator.gather(loss.detach().reshape(1)).mean().item()
    accelerator.wait_for_everyone()
    accelerator.end_training()
"""
ACCELERATE_RUN = """
losses = list(training_function(8))
"""
ACCELERATE_ALONE = """
alone = []
set_seed(42)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
for epoch in range(2):
    for inputs, targets in zip(x.split(16), y.split(16)):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        alone.append(loss.item())
"""
TRAINER = """
# transformers: the Trainer, with a small GPT-2 and made data
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

torch.manual_seed(0)
tokens = torch.randint(0, 32, (64, 12))
rows = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(
    vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

def make_model():
    set_seed(1)
    return GPT2LMHeadModel(config)

def make_trainer(size):
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=size, num_train_epochs=2, learning_rate=1e-2,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
    return Trainer(make_model(), arguments, train_dataset=rows)
"""
TRAINER_RUN = """
trainer = make_trainer(16 // int(os.environ["WORLD_SIZE"]))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
trainer.save_model("saved")
"""
TRAINER_ALONE = """
trainer = make_trainer(16)
trainer.train()
alone = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""
LIGHTNING = """
# Lightning, as in its "Lightning in 15 minutes"
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

class Sum(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x.sum(1, keepdim=True))

def make_trainer(**options):
    return L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options)

def train(trainer, batch_size):
    torch.manual_seed(0)
    losses.clear()
    trainer.fit(Sum(), DataLoader(data, batch_size))
    return [*losses]

losses = []
above = make_trainer()  # where there is one process
"""
LIGHTNING_RUN = """
ranks = int(os.environ["WORLD_SIZE"])
first = train(above, 64 // ranks)
for strategy in ("auto", "ddp_notebook", "ddp_spawn"):
    for _ in range(2):
        trainer = make_trainer(strategy=strategy, devices="auto" if strategy == "auto" else ranks)
        assert train(trainer, 64 // ranks) == first
        assert (trainer.world_size, trainer.global_rank) == (ranks, int(os.environ["RANK"]))
    fabric = L.Fabric(strategy=strategy, devices="auto" if strategy == "auto" else ranks)
    assert fabric.launch(lambda fabric, n: (fabric.world_size, n), 3) == (ranks, 3)
losses = first
"""
LIGHTNING_ALONE = """
losses, alone = losses, train(make_trainer(devices=1), 64)
"""
LIGHTNING_REFUSED = """
def linear():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters())

for use, error in {
    lambda: train(make_trainer(devices=1), 8): "Trainer does not know the other 1 rank",
    lambda: L.Fabric(devices=1).setup(*linear()): "Fabric does not know the other 1 rank",
    lambda: train(make_trainer(devices=3, strategy="ddp_notebook"), 8): "--cores 3",
    lambda: make_trainer(accelerator="gpu"): "no GPU. Leave accelerator out",
    lambda: make_trainer(accelerator="tpu"): "torch_xla's, and the run has",
}.items():
    try:
        use()
    except Exception as refused:
        assert type(refused).__name__ == "SetupError" and error in str(refused), refused
    else:
        assert False, error
"""
TRAINED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def start():
    dist.init_process_group(GROUP)
    return make(), data(dist.get_rank())

def data(seed):
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

def make():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8).to(DEVICE)

def fit(model, x, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if dist.is_initialized():
            dist.all_reduce(loss.detach())
        optimizer.step()
"""
TRAINED_RUNS = {
    # What the card says of the models, and a train cell.
    "one model": ("", "model, x = start()\nfit(DistributedDataParallel(model), x)"),
    "no DistributedDataParallel": ("different", "fit(*start())"),
    "its module": (
        "different",
        "model, x = start()\nfit(DistributedDataParallel(model).module, x)",
    ),
    "alone": ("alone", "fit(make(), data(0))"),
    "alone, on other data": ("alone", "fit(make(), data(int(os.environ['RANK'])))"),
    "trials": ("", "fit(make(), data(0), lr=0.1 * (1 + int(os.environ['RANK'])))"),
    "one rank": ("", "#\nfit(make(), data(0))"),
    "ensemble, collected": (
        "",
        "model, x = start()\nfit(model, x)\nmodels = [None] * 2\n"
        "dist.all_gather_object(models, [each.tolist() for each in model.parameters()])",
    ),
    "pipeline": (
        "",
        """
_, x = start()
rank = dist.get_rank()
torch.manual_seed(rank)
stage = torch.nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    received = torch.empty_like(x)
    if rank == 0:
        sent = stage(x)
        dist.send(sent.detach(), 1)
        dist.recv(received, 1)
        sent.backward(received)
    else:
        dist.recv(received, 0)
        stage(received.requires_grad_()).square().mean().backward()
        dist.send(received.grad, 0)
    optimizer.step()
""",
    ),
    "tensor parallel": (
        "",
        """
_, x = start()
torch.manual_seed(dist.get_rank())
half = torch.nn.Linear(8, 8).to(DEVICE)
optimizer = torch.optim.SGD(half.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    part = half(data(0))
    whole = part.detach().clone()
    dist.all_reduce(whole)
    part.backward(whole)
    optimizer.step()
""",
    ),
}
