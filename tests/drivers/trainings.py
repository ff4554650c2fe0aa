"""A small training that is sent to places: the same numbers on any number of ranks."""

PRELUDE = """
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import tpunb

torch.manual_seed(0)
x, y = torch.randn(64, 3), torch.randn(64, 1)
model = torch.nn.Linear(3, 1)
"""
TRAIN = """
device, rank, world = torch_xla.device(), xr.global_ordinal(), xr.world_size()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
part = slice(rank * 64 // world, (rank + 1) * 64 // world)
a, b = x[part].to(device), y[part].to(device)
for step in range(5):
    optimizer.zero_grad()
    loss = ((model(a) - b) ** 2).mean()
    loss.backward()
    xm.optimizer_step(optimizer)
    tpunb.log(step=step, loss=loss)
"""
