"""What rank notes of its optimizers, and which programs of several ranks train one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.drivers.ranks import Ranks, rehearse
from tpunb.runs.models import DifferentModels, find_difference, read_models
from tpunb.runs.spec import ModelsCause

STEPS = 5


Program = Callable[[], None]


def net(seed: int = 0) -> Any:
    import torch
    import torch_xla

    torch.manual_seed(seed)
    layers = torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    return torch.nn.Sequential(*layers).to(torch_xla.device())


def sgd(model: Any, lr: float = 0.1) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: Any, rank: int, step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(100 * rank + step)
    x = torch.rand(4, 6, generator=generator).to(next(model.parameters()).device)
    return model(x).square().mean()


def average(tensors: Any) -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    xm.all_reduce("sum", list(tensors), scale=1 / xr.world_size())


def average_gradients(model: Any) -> None:
    average(p.grad for p in model.parameters() if p.grad is not None)


def plain(step_of: Callable[[Any], None], **options: Any) -> None:
    """A loop whose step is `step_of(optimizer)`."""
    import torch_xla
    import torch_xla.runtime as xr

    rank = xr.global_ordinal()
    model = net(options.get("seed", 0))
    optimizer = options.get("make", sgd)(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        step_of(optimizer)
        torch_xla.sync()
        if "after" in options:
            options["after"](loss, optimizer)


def with_xm(optimizer: Any) -> None:
    import torch_xla.core.xla_model as xm

    xm.optimizer_step(optimizer)


def without_reduction(optimizer: Any) -> None:
    optimizer.step()


# -- programs that train one model, or mean to train several


def optimizer_step() -> None:
    plain(with_xm)


def cleared_after_the_step() -> None:
    plain(with_xm, after=lambda loss, optimizer: optimizer.zero_grad())


def ddp() -> None:
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.xla_backend
    import torch_xla.runtime as xr
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("xla", init_method="xla://")
    model = DistributedDataParallel(net(), broadcast_buffers=False)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, xr.global_ordinal(), step).backward()
        optimizer.step()
        torch_xla.sync()


def by_hand_with_accumulation_and_averaged_copy() -> None:
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    model = net()
    copy = net()
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.01},
            {"params": model[2].parameters(), "lr": 0.02},
        ]
    )
    model[0].bias.requires_grad_(False)
    for step in range(2 * STEPS):
        loss_of(model, xr.global_ordinal(), step).backward()
        if step % 2:
            average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, new in zip(copy.parameters(), model.parameters(), strict=True):
                    mean.lerp_(new, 0.1)
        torch_xla.sync()


def halves_of_a_gan() -> None:
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    rank = xr.global_ordinal()
    player = [net(), torch.nn.Linear(6, 7).to(torch_xla.device())][rank]
    optimizer = sgd(player)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(player, rank, step).backward()
        optimizer.step()
        torch_xla.sync()


def alike_halves_of_a_gan() -> None:
    import torch_xla
    import torch_xla.runtime as xr

    rank = xr.global_ordinal()
    generator, critic = net(1), net(2)
    optimizer = sgd(generator if rank == 0 else critic)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(generator if rank == 0 else critic, rank, step).backward()
        optimizer.step()
        torch_xla.sync()


def averaged_at_the_end() -> None:
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    model = net()
    for turn in range(2):  # an optimizer for each round
        optimizer = sgd(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, xr.global_ordinal(), step + turn).backward()
            optimizer.step()
            torch_xla.sync()
        with torch.no_grad():
            average(model.parameters())


def collected_at_the_end() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    model = net()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, xr.global_ordinal(), step).backward()
        optimizer.step()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    xm.mesh_reduce("models", state, lambda states: sum(each["0.weight"] for each in states))


def lbfgs() -> None:
    import torch
    import torch_xla.runtime as xr

    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, xr.global_ordinal(), 0)
        loss.backward()
        average_gradients(model)
        total = loss.detach().clone()
        average([total])
        return total

    for _ in range(2):
        optimizer.step(closure)


def on_the_cpu_of_one_rank() -> None:
    import torch
    import torch_xla.runtime as xr

    if xr.global_ordinal() == 0:
        model = torch.nn.Linear(6, 3)
        optimizer = sgd(model)
        for step in range(STEPS):
            loss_of(model, 0, step).backward()
            optimizer.step()


def the_same_on_each_cpu() -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    optimizer = sgd(model)
    for step in range(STEPS):
        loss_of(model, 0, step).backward()
        optimizer.step()


def fsdp() -> None:
    import torch_xla
    import torch_xla.runtime as xr
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    model = XlaFullyShardedDataParallel(net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, xr.global_ordinal(), step).backward()
        optimizer.step()
        torch_xla.sync()


def zero() -> None:
    import torch
    import torch_xla
    import torch_xla.runtime as xr
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    model = net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, pin_layout=True, grad_clipping=False
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, xr.global_ordinal(), step).backward()
        optimizer.step()
        torch_xla.sync()


def inference() -> None:
    import torch
    import torch_xla.runtime as xr

    with torch.no_grad():
        loss_of(net(xr.global_ordinal()), 0, 0).item()


# -- programs that may mean to


def local_sgd() -> None:
    import torch
    import torch_xla
    import torch_xla.runtime as xr

    model = net()
    optimizer = sgd(model)
    for step in range(7):
        optimizer.zero_grad()
        loss_of(model, xr.global_ordinal(), step).backward()
        optimizer.step()
        if step % 3 == 2:
            with torch.no_grad():
                average(model.parameters())
        torch_xla.sync()


def parts_of_a_layer() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    rank = xr.global_ordinal()
    model = net(rank)
    optimizer = sgd(model)
    for _step in range(STEPS):
        optimizer.zero_grad()
        x = net(7)[0].weight.detach()
        total = xm.all_reduce("sum", model(x).repeat(4, 3))
        total.square().mean().backward()
        optimizer.step()
        torch_xla.sync()


# -- programs with mistakes


def no_reduction() -> None:
    plain(without_reduction)


def no_reduction_and_averaged_losses() -> None:
    import torch_xla.core.xla_model as xm

    def log(loss: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        xm.all_reduce("sum", loss.detach()).item()

    plain(without_reduction, after=log)


def no_reduction_at_a_low_rate() -> None:
    import torch

    plain(without_reduction, make=lambda model: torch.optim.Adam(model.parameters(), lr=1e-5))


def other_seeds() -> None:
    import torch_xla.runtime as xr

    plain(with_xm, seed=xr.global_ordinal())


def other_seeds_and_cleared() -> None:
    import torch_xla.runtime as xr

    plain(
        with_xm,
        seed=xr.global_ordinal(),
        after=lambda loss, optimizer: optimizer.zero_grad(),
    )


def other_learning_rates() -> None:
    import torch_xla.runtime as xr

    rate = 0.1 * (1 + xr.global_ordinal())
    plain(with_xm, make=lambda model: sgd(model, rate))


def plateau_of_the_local_loss() -> None:
    import torch
    import torch_xla.runtime as xr

    held: list[Any] = []

    def follow(loss: Any, optimizer: Any) -> None:
        held[:] = held or [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)]
        held[0].step(1.0 if xr.global_ordinal() else 1.0 / (1 + held[0].last_epoch))

    plain(with_xm, after=follow)


def changed_on_one_rank() -> None:
    import torch
    import torch_xla.runtime as xr

    def load(loss: Any, optimizer: Any) -> None:
        if xr.global_ordinal():
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].mul_(1.01)

    plain(with_xm, after=load)


def trained(names: list[str], folder: str) -> None:
    rank, _ = rehearse()
    from tpunb.worker.returns import finish_pending_work
    from tpunb.worker.stepped import SteppedModels

    for name in names:
        models = SteppedModels()
        models.watch()
        globals()[name]()
        finish_pending_work()
        models.save(Path(folder, f"{name}-{rank}.json"))


def differences(
    ranks: Ranks, programs: Sequence[Program], folder: Path
) -> dict[Program, DifferentModels | None]:
    ranks.values(trained, 2, [program.__name__ for program in programs], str(folder))
    return {
        program: find_difference(
            {rank: read_models(folder / f"{program.__name__}-{rank}.json") for rank in range(2)}
        )
        for program in programs
    }


EQUAL = [
    optimizer_step,
    cleared_after_the_step,
    by_hand_with_accumulation_and_averaged_copy,
    halves_of_a_gan,
    alike_halves_of_a_gan,
    averaged_at_the_end,
    on_the_cpu_of_one_rank,
    the_same_on_each_cpu,
    inference,
]
EQUAL_BUT_SLOW = [collected_at_the_end, lbfgs, fsdp, zero, ddp]
"""XLA compiles many programs for them: in tests/long."""
DIFFERENT = {
    local_sgd: ModelsCause.UNKNOWN,
    parts_of_a_layer: ModelsCause.UNKNOWN,
    no_reduction: ModelsCause.NOT_AVERAGED,
    no_reduction_and_averaged_losses: ModelsCause.NOT_AVERAGED,
    no_reduction_at_a_low_rate: ModelsCause.NOT_AVERAGED,
    other_seeds: ModelsCause.BEGINNING,
    other_seeds_and_cleared: ModelsCause.BEGINNING,
    other_learning_rates: ModelsCause.LEARNING_RATE,
    plateau_of_the_local_loss: ModelsCause.LEARNING_RATE,
    changed_on_one_rank: ModelsCause.BEGINNING,
}


def test_nothing_is_said_of_models_that_are_equal_or_not_meant_to_be(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = differences(ranks, EQUAL, tmp_path)
    assert {program: each for program, each in found.items() if each is not None} == {}


def test_different_models_and_why(ranks: Ranks, tmp_path: Path) -> None:
    found = differences(ranks, list(DIFFERENT), tmp_path)
    assert {program: each and each.cause for program, each in found.items()} == DIFFERENT
