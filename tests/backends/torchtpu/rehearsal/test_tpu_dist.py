"""TorchTPU's process groups on a rehearsed TPU: how they are made, and what they train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.drivers.devices import BACKENDS, rehearse_on
from tests.drivers.ranks import Ranks
from tpunb.backends.rehearsal.errors import is_of_torch_distributed

# Functions without `test_` run in ranks; each is followed by the test that calls it.


def on_each_device(function: Any) -> Any:
    return pytest.mark.parametrize("device", list(BACKENDS))(function)


# -- how groups are made


def connects_last(folder: str) -> bool:
    rank, _ = rehearse_on("tpu")
    dist.destroy_process_group()
    connected, gloo = Path(folder) / "connected", dist.ProcessGroupGloo

    def slowly(*args: Any) -> Any:
        group = gloo(*args)
        time.sleep(0.3)  # in which rank 0 goes on, if nothing holds it
        connected.touch()
        return group

    if rank == 1:
        dist.ProcessGroupGloo = slowly  # type: ignore[assignment,misc]
    dist.init_process_group("tpu_dist")
    return connected.exists()


def test_no_rank_goes_on_while_another_connects(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(connects_last, 2, str(tmp_path)) == [True, True]


def backends() -> list[str]:
    rank, world = rehearse_on("tpu")
    found = []
    tpu = torch.device("tpu:0")
    ways: list[dict[str, Any]] = [
        {"backend": "tpu"},
        {"backend": "cpu:gloo,tpu:tpu_dist"},
        {"backend": "tpu_dist", "device_id": tpu},
        {},
    ]
    for options in ways:
        dist.destroy_process_group()
        dist.init_process_group(**options)
        x = torch.ones(2, device="tpu")
        dist.all_reduce(x)
        assert x.tolist() == [world] * 2
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, rank)
        assert objects == list(range(world))
        try:
            dist.all_reduce(torch.ones(2))
            found.append("CPU")
        except RuntimeError as error:
            found.append(str(error))
        dist.barrier()
    dist.destroy_process_group()
    mesh = dist.device_mesh.init_device_mesh("tpu", (world,))
    return [*found, mesh.device_type]


def test_backends_and_the_tensors_that_they_take(ranks: Ranks) -> None:
    for one, both, bound, default, mesh in ranks.values(backends, 2):
        assert one == bound == "No backend type associated with device type cpu"
        assert both == "CPU"
        assert default in ("CPU", one)  # torch's own choice
        assert mesh == "tpu"


def missing() -> list[str]:
    _, world = rehearse_on("tpu")
    x = torch.ones(2, device="tpu")
    found = []
    calls: list[Callable[[], Any]] = [
        lambda: dist.reduce(x, 0),
        lambda: dist.all_reduce_coalesced([x]),
        lambda: dist.recv(x),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        found.append(str(raised.value))
        assert not is_of_torch_distributed(raised.value)  # no peer was lost
    dist.all_reduce(x)
    assert x.tolist() == [world] * 2
    return found


def test_what_torchtpu_lacks_is_refused(ranks: Ranks) -> None:
    for found in ranks.values(missing, 2):
        assert found == [
            "Backend tpu_dist does not support reduce",
            "Backend tpu_dist does not support allreduce_coalesced",
            "Backend tpu_dist does not support recv_any_source",
        ]


def with_device_ids() -> str:
    rank, _ = rehearse_on("tpu")
    model = nn.Linear(2, 2).to("tpu")
    x = torch.ones(1, 2, device="tpu")
    DistributedDataParallel(model)(x).sum().backward()
    DistributedDataParallel(model, device_ids=[0])(x).sum().backward()
    with pytest.raises(ValueError, match="tpu:") as refused:
        DistributedDataParallel(model, device_ids=[rank + 1])
    return str(refused.value)


def test_each_rank_sees_one_device(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks.values(with_device_ids, 2)):
        assert f"names tpu:{rank + 1}, which does not exist" in message


# -- what is trained, compared with one process on the same batches


STEPS = 10
SAME = 1e-5


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3)
    )


def batches(rank: int, world: int, device: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        x = torch.randn(24, 20, generator=generator)
        y = torch.randint(0, 3, (24,), generator=generator)
        yield x.chunk(world)[rank].to(device), y.chunk(world)[rank].to(device)


def train(
    trained: nn.Module,
    parameters: Any,
    rank: int,
    world: int,
    device: str,
    run: Callable[..., Any] | None = None,
) -> list[float]:
    """The losses of the whole batches."""
    losses = []
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for x, y in batches(rank, world, device):
        loss = functional.cross_entropy((trained if run is None else run)(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def trained_in_ddp(rank: int, world: int, device: str, way: str) -> tuple[list[float], list[Any]]:
    options = {} if way in ("plain", "compiled") else {way: True}
    ddp = DistributedDataParallel(model().to(device), **options)
    run = torch.compile(ddp) if way == "compiled" else None
    losses = train(ddp, ddp.parameters(), rank, world, device, run)
    return losses, [parameter.detach().cpu() for parameter in ddp.parameters()]


def trained_in_fsdp(rank: int, world: int, device: str, way: str) -> tuple[list[float], list[Any]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"reshard_after_forward": way != "not resharded"}
    if way == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device, (world,))
    sharded = model().to(device)
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(sharded, mesh=mesh, **options)
    losses = train(sharded, sharded.parameters(), rank, world, device)
    return losses, [parameter.full_tensor().detach().cpu() for parameter in sharded.parameters()]


DDP = ("plain", "gradient_as_bucket_view", "static_graph", "find_unused_parameters", "compiled")
FSDP = ("resharded", "not resharded", "bfloat16")


def differences(device: str) -> dict[str, float]:
    """The largest difference in losses and weights from one process, for each way to train."""
    rank, world = rehearse_on(device)
    alone = model()
    losses = train(alone, alone.parameters(), 0, 1, "cpu")
    found = {}
    for ways, trained in ((DDP, trained_in_ddp), (FSDP, trained_in_fsdp)):
        for way in ways:
            own, weights = trained(rank, world, device, way)
            pairs = zip(weights, alone.parameters(), strict=True)
            largest = max((a - b).abs().max().item() for a, b in pairs)
            found[way] = max(largest, *(abs(a - b) for a, b in zip(own, losses, strict=True)))
    return found


@on_each_device
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_train_what_one_process_trains(ranks: Ranks, device: str, world: int) -> None:
    for found in ranks.values(differences, world, device):
        assert 0 < found.pop("bfloat16") < 0.05
        assert found.keys() == {*DDP, *FSDP} - {"bfloat16"}
        assert max(found.values()) < SAME, found


def sharded_tensors(device: str) -> None:
    _, world = rehearse_on(device)
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.device_mesh.init_device_mesh(device, (world,))
    whole = torch.arange(8.0 * world).reshape(2 * world, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    assert rows.sum().full_tensor().item() == whole.sum().item()
    assert torch.equal((rows @ weight).full_tensor().cpu(), whole @ torch.ones(4, 4))
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor().cpu(), whole)
    partial = DTensor.from_local(torch.ones(2, device=device), mesh, [Partial()])
    assert partial.full_tensor().tolist() == [world] * 2

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    expected = layers(x)
    expected.sum().backward()
    gradient = layers[0].weight.grad
    layers.zero_grad(set_to_none=True)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(layers.to(device), mesh, plan)
    result = parallel(x.to(device))
    result.sum().backward()
    assert torch.allclose(result.cpu(), expected, atol=SAME)
    assert torch.allclose(parallel[0].weight.grad.full_tensor().cpu(), gradient, atol=SAME)


@on_each_device
def test_dtensor_and_tensor_parallel(ranks: Ranks, device: str) -> None:
    ranks.values(sharded_tensors, 4, device)


def random_tensors(seed: int) -> list[list[float]]:
    _, world = rehearse_on("tpu")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor import rand as sharded_rand

    mesh = dist.device_mesh.init_device_mesh("tpu", (world,))
    rows = distribute_tensor(torch.ones(2 * world, 4, device="tpu"), mesh, [Shard(0)])
    same = distribute_tensor(torch.ones(8, 4, device="tpu"), mesh, [Replicate()])
    with torch.device("meta"):
        deferred = model()
    torch.manual_seed(seed)
    fully_shard(deferred, mesh=mesh)
    deferred.to_empty(device="tpu")
    for layer in deferred[::2]:
        layer.reset_parameters()  # type: ignore[operator]
    made = [
        rows.clone().normal_(),
        rows.clone().normal_(),
        rows.clone().uniform_(),
        functional.dropout(rows.clone().normal_(), 0.5),
        sharded_rand(2 * world, 4, device_mesh=mesh, placements=[Shard(0)]),
        deferred[0].weight,  # type: ignore[list-item]
    ]
    found = [each.detach().full_tensor().cpu() for each in made]
    for whole in found:
        assert not torch.equal(*whole.chunk(2))  # each rank has its own part
    found += [functional.dropout(same, 0.5).to_local().cpu(), torch.rand(4, device="tpu").cpu()]
    return [whole.flatten().tolist() for whole in found]


def test_random_numbers_of_dtensors(ranks: Ranks) -> None:
    """Also where FSDP2 begins on the meta device: one tensor on all ranks, given by the seed."""
    first, second = ranks.values(random_tensors, 2, 3)
    assert first == second
    assert first[0] != first[1]
    assert ranks.values(random_tensors, 2, 3) == [first, first]
    other = ranks.values(random_tensors, 2, 4)[0]
    assert all(a != b for a, b in zip(first, other, strict=True))


def checkpoint(device: str, folder: str, save: bool) -> list[list[float]]:
    _, world = rehearse_on(device)
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device, (world,))
    sharded = model().to(device)
    if not save:
        for parameter in sharded.parameters():
            nn.init.zeros_(parameter)
    fully_shard(sharded, mesh=mesh)
    state = get_model_state_dict(sharded)
    if save:
        checkpoint.save(state, checkpoint_id=folder)
    else:
        checkpoint.load(state, checkpoint_id=folder)
    return [value.full_tensor().flatten().tolist() for value in state.values()]


@on_each_device
def test_a_distributed_checkpoint_is_loaded_on_fewer_ranks(
    ranks: Ranks, device: str, tmp_path: Path
) -> None:
    saved, *_ = ranks.values(checkpoint, 4, device, str(tmp_path), True)
    for world in (2, 1):
        for loaded in ranks.values(checkpoint, world, device, str(tmp_path), False):
            assert loaded == saved
