"""Trainings of models of which each rank has a part: saved and loaded with tpunb, in ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.drivers.devices import rehearse_on


class Model(nn.Module):
    """Tensor parallelism divides its 8 hidden units; FSDP also 6 and 1, among up to 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.middle = nn.Linear(8, 6)
        self.last = nn.Linear(6, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        hidden = self.first(x).relu()
        out: torch.Tensor = self.last(self.middle(hidden).relu())
        return out


def _mesh(device: str, *shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, shape, mesh_dim_names=names)


def fsdp2(model: Model, device: str) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.middle)
    fully_shard(model)


def hsdp(model: Model, device: str) -> None:
    """Two groups of ranks that hold the same parts; with one rank, one."""
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    groups = min(world, 2)
    mesh = _mesh(device, groups, world // groups, names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Model, device: str, mesh: Any = None) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or _mesh(device, dist.get_world_size())
    plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


def fsdp2_and_tensor_parallel(model: Model, device: str) -> None:
    from torch.distributed.fsdp import fully_shard

    world = dist.get_world_size()
    parts = min(world, 2)
    mesh = _mesh(device, world // parts, parts, names=("dp", "tp"))
    tensor_parallel(model, device, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])


def dtensor(model: Model, device: str) -> None:
    """Parameters by hand: rows, columns, and whole ones in each rank."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = _mesh(device, dist.get_world_size())
    for module in (model.first, model.middle, model.last):
        for name, parameter in list(module.named_parameters()):
            where: Any = Replicate()
            if parameter.ndim == 2 and module is not model.last:
                where = Shard(1) if module is model.middle else Shard(0)
            new = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [where]))
            module.register_parameter(name, new)


LAYOUTS: dict[str, Callable[[Model, str], None]] = {
    each.__name__: each
    for each in (fsdp2, hsdp, tensor_parallel, fsdp2_and_tensor_parallel, dtensor)
}


def _make(layout: str, device: str) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model().to(device)
    if layout:
        LAYOUTS[layout](model, device)
    # One parameter at a time: torch 2.13 refuses DTensors and other tensors in one operation.
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def whole(value: Any) -> Any:
    """A state with lists of numbers in place of tensors, gathered where they are divided."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().cpu().tolist()
    return value


def _states(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _step(model: Model, optimizer: torch.optim.Optimizer, device: str) -> None:
    """A step with the same batch in each rank, so that the result is that of one process."""
    from torch.distributed.tensor.experimental import implicit_replication

    x = torch.arange(12.0).reshape(4, 3).div(12).to(device)
    optimizer.zero_grad()
    with implicit_replication():  # x and `seen` are no DTensors, the parameters by hand are
        (model(x) - 1).square().mean().backward()
        optimizer.step()


def train(folder: str, device: str, layouts: list[str]) -> dict[str, Any]:
    """Save each layout after two steps; return the whole states then, and after another step."""
    import tpunb

    rehearse_on(device)
    found = {}
    for layout in layouts:
        model, optimizer = _make(layout, device)
        for step in range(2):
            _step(model, optimizer, device)
            tpunb.save(_states(model, optimizer), step, path=f"{folder}/{layout}")
        saved = whole(_states(model, optimizer))
        _step(model, optimizer, device)
        found[layout] = saved, whole(_states(model, optimizer))
    return found


def go_on(folder: str, device: str, layouts: list[str]) -> dict[str, Any]:
    """Load each into a new model; the step, the whole states, and those after another step."""
    import tpunb

    rehearse_on(device)
    found = {}
    for layout in layouts:
        model, optimizer = _make(layout, device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpoint = tpunb.load(f"{folder}/{layout}")
        assert checkpoint is not None
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loaded = whole(_states(model, optimizer))
        _step(model, optimizer, device)
        found[layout] = checkpoint.step, loaded, whole(_states(model, optimizer))
    return found


def resumed_training(folder: str, device: str) -> tuple[Any, Any]:
    """A `TrainingState` of FSDP2: the end of a training, and that of one that was resumed."""
    from tpunb.training import TrainingState

    rehearse_on(device)
    ends = []
    for resumed in (False, True):
        model, optimizer = _make("fsdp2", device)
        state = TrainingState(model=model, optimizer=optimizer, path=folder)
        step = state.load() if resumed else 0
        assert step == (3 if resumed else 0)
        for each in range(step, 5):
            _step(model, optimizer, device)
            if each < 3:
                state.save(each)
        ends.append(whole(_states(model, optimizer)))
    return ends[0], ends[1]


def save_in_rank_0(folder: str, device: str) -> None:
    import tpunb

    rank, _ = rehearse_on(device)
    model, _ = _make("fsdp2", device)
    if rank == 0:
        tpunb.save({"model": model.state_dict()}, 0, path=folder)
    dist.barrier()


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def refused(folder: str, device: str) -> list[str]:
    """The errors for a DTensor inside an object, and for one whose sum is not made yet."""
    from torch.distributed.tensor import DTensor, Partial

    import tpunb
    from tpunb.errors import CheckpointError

    rehearse_on(device)
    model, _ = _make("fsdp2", device)
    mesh = _mesh(device, dist.get_world_size())
    sums = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    found = []
    for state in ({"weight": model.last.bias, "box": Box(model.last.bias)}, {"sums": sums}):
        state = {"model": model.state_dict(), **state}
        try:
            tpunb.save(state, 0, path=folder)
        except CheckpointError as error:
            found.append(str(error))
    return found
