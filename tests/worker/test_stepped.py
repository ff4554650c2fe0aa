"""What a rank notes of its optimizers, and which programs of several ranks train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.drivers.lazy import torch_xla, xm, xr
from tests.drivers.ranks import Ranks, rehearse
from tpunb.runs.trained_models import find_difference, read_models

STEPS = 5


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    return torch.nn.Sequential(*layers).to(torch_xla.device())


def sgd(model: Any, lr: float = 0.1) -> Any:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: Any, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.rand(4, 6, generator=generator).to(next(model.parameters()).device)
    return model(x).square().mean()


def average(tensors: Any) -> None:
    with torch.no_grad():
        xm.all_reduce("sum", list(tensors), scale=1 / xr.world_size())


def average_gradients(model: Any) -> None:
    average(p.grad for p in model.parameters() if p.grad is not None)


def nothing(*_: object) -> None:
    """For ranks that do not exchange anything."""


def loop(
    model: Any,
    exchange: Callable[[Any], None] = average_gradients,
    after: Callable[[Any, Any, int], object] = nothing,
    optimizer: Any = None,
    steps: int = STEPS,
) -> None:
    """A training; `exchange(model)` comes before each step, `after(loss, optimizer, step)` then."""

    optimizer = optimizer or sgd(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, xr.global_ordinal(), step)
        loss.backward()
        exchange(model)
        optimizer.step()
        after(loss, optimizer, step)
        torch_xla.sync()


def rank_number() -> int:
    return int(xr.global_ordinal())


# -- programs that train one model, or mean to train several


def by_hand_with_accumulation_and_averaged_copy() -> None:
    model, copy = net(), net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": model[2].parameters(), "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups)
    model[0].bias.requires_grad_(False)
    for step in range(2 * STEPS):
        loss_of(model, rank_number(), step).backward()
        if step % 2:
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, new in zip(copy.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
        torch_xla.sync()


def halves_of_a_gan() -> None:
    other = torch.nn.Linear(6, 7).to(torch_xla.device())
    loop([net(), other][rank_number()], nothing)


def averaged_at_the_end() -> None:
    model = net()
    for _ in range(2):  # an optimizer for each round
        loop(model, nothing)
        average(model.parameters())


def on_the_cpu_of_one_rank() -> None:
    if rank_number() == 0:
        loop(torch.nn.Linear(6, 3), nothing)


def inference() -> None:
    with torch.no_grad():
        loss_of(net(rank_number()), 0, 0).item()


def collected_at_the_end() -> None:
    model = net()
    loop(model, nothing)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    xm.mesh_reduce("models", state, lambda states: sum(each["0.weight"] for each in states))


def lbfgs() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, rank_number(), 0)
        loss.backward()
        average_gradients(model)
        total = loss.detach().clone()
        average([total])
        return total

    for _ in range(2):
        optimizer.step(closure)


def ddp() -> None:
    import torch_xla.distributed.xla_backend  # noqa: F401

    dist.init_process_group("xla", init_method="xla://")
    loop(DistributedDataParallel(net(), broadcast_buffers=False), nothing)


def fsdp() -> None:
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    loop(XlaFullyShardedDataParallel(net()), nothing)


def zero() -> None:
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, pin_layout=True, grad_clipping=False
    )
    loop(model, nothing, optimizer=optimizer)


# -- programs with mistakes, or that may have one


def local_sgd() -> None:
    model = net()

    def now_and_then(loss: Any, optimizer: Any, step: int) -> None:
        if step % 3 == 2:
            average(model.parameters())

    loop(model, nothing, now_and_then, steps=7)


def parts_of_a_layer() -> None:
    model = net(rank_number())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = net(7)[0].weight.detach()
        total = xm.all_reduce("sum", model(x).repeat(4, 3))
        total.square().mean().backward()
        optimizer.step()
        torch_xla.sync()


def no_reduction_and_averaged_losses() -> None:
    def log(loss: Any, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        xm.all_reduce("sum", loss.detach()).item()

    loop(net(), nothing, log)


def no_reduction_at_a_low_rate() -> None:
    model = net()
    loop(model, nothing, optimizer=torch.optim.Adam(model.parameters(), lr=1e-5))


def other_learning_rates() -> None:
    model = net()
    loop(model, optimizer=sgd(model, 0.1 * (1 + rank_number())))


Program = Callable[[], None]
EQUAL: dict[str, Program] = {
    "averaged gradients": lambda: loop(net()),
    "accumulation and a copy": by_hand_with_accumulation_and_averaged_copy,
    "halves of a GAN": halves_of_a_gan,
    "averaged at the end": averaged_at_the_end,
    "on the CPU of one rank": on_the_cpu_of_one_rank,
    "inference": inference,
    "parts of a layer": parts_of_a_layer,
}
EQUAL_BUT_SLOW: dict[str, Program] = {
    "collected at the end": collected_at_the_end,
    "L-BFGS": lbfgs,
    "FSDP": fsdp,
    "ZeRO-1": zero,
    "DDP": ddp,
}
"""XLA compiles many programs for them: in tests/long."""
DIFFERENT: dict[str, Program] = {
    "local SGD": local_sgd,
    "no reduction": lambda: loop(net(), nothing),
    "averaged losses only": no_reduction_and_averaged_losses,
    "no reduction at a low rate": no_reduction_at_a_low_rate,
    "other seeds": lambda: loop(net(rank_number())),
    "other learning rates": other_learning_rates,
}


def trained(names: list[str], folder: str) -> None:
    rank, _ = rehearse()
    from tpunb.worker.stepped import SteppedModels

    programs = EQUAL | EQUAL_BUT_SLOW | DIFFERENT
    for name in names:
        models = SteppedModels()
        models.watch(groups=False)
        programs[name]()
        torch_xla.sync(wait=True)
        models.save(Path(folder, f"{name}-{rank}.json"))


def blamed(ranks: Ranks, names: Iterable[str], folder: Path) -> list[str]:
    """The programs of these whose ranks train different models."""
    ranks.values(trained, 2, list(names), str(folder))
    models = {n: {rank: read_models(folder / f"{n}-{rank}.json") for rank in (0, 1)} for n in names}
    return [name for name in names if find_difference(models[name])]


def test_ranks_with_different_models_and_those_that_rightly_have_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert blamed(ranks, [*EQUAL, *DIFFERENT], tmp_path) == list(DIFFERENT)
