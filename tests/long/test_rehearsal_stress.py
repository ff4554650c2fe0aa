"""Many collectives of all kinds and sizes in fresh processes, none of which may hang or err."""

from __future__ import annotations

import random
import time

import pytest

from tests.drivers.ranks import Ranks, rehearse

RANKS, ROUNDS = 4, 60
SIZES = (1, 7, 900, 1008, 1009, 30_000, 524_288, 524_289, 700_000)
"""Sizes in float32: sent in the message, in shared memory and by gloo, and next to the limits."""


def mixed(seed: int) -> int:
    """Random calls: the same on all ranks, at different times."""
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device, same, own = torch_xla.device(), random.Random(seed), random.Random(seed + 1 + rank)
    everyone = sum(range(world))
    for _ in range(ROUNDS):
        count, kind = same.choice(SIZES), same.randrange(9)
        halves = same.random() < 0.3
        groups = [[0, 1], [2, 3]] if halves else None
        total = {0: 1, 1: 1, 2: 5, 3: 5}[rank] if halves else everyone
        if own.random() < 0.3:
            time.sleep(0.02 * own.random())
        x = torch.full((count,), float(rank), device=device)
        if kind == 0:
            found, wanted = xm.all_reduce("sum", x, groups=groups), total
        elif kind == 1:
            many = [x, x + 1, torch.full((2, 3), float(rank), device=device)]
            xm.all_reduce("sum", many, groups=groups)
            found, wanted = many[0], total
            assert many[2].sum().item() == 6 * total
        elif kind == 2:
            found = xm.all_gather(x, groups=groups)
            wanted = total * count / found.numel()
        elif kind == 3:
            found = xm.reduce_scatter("sum", x.repeat(world), 1.0, 0, world)
            wanted = everyone
        elif kind == 4:
            found = xm.all_to_all(x.repeat(world), 0, 0, world)
            wanted = everyone / world
        elif kind == 5:
            shift = same.randrange(1, world)
            found = xm.collective_permute(x, [[r, (r + shift) % world] for r in range(world)])
            wanted = (rank - shift) % world
        elif kind == 6:
            said = xm.rendezvous("r", bytes([rank]) * (count + rank))
            assert said == [bytes([r]) * (count + r) for r in range(world)]
            continue
        elif kind == 7:
            found, wanted = xm.all_reduce("max", x), world - 1
        else:
            pair = sorted(same.sample(range(world), 2))
            found = xm.collective_permute(x, [pair])
            wanted = pair[0] if rank == pair[1] else 0
        if same.random() < 0.5:  # ranks that differ in it run other programs: that is an error
            torch_xla.sync()
        assert abs(found.mean().item() - wanted) < 1e-4, (kind, count, groups)
    return ROUNDS


@pytest.mark.parametrize("seed", range(8))
def test_random_mixed_collectives_do_not_hang(ranks: Ranks, seed: int) -> None:
    assert ranks.values(mixed, RANKS, seed) == [ROUNDS] * RANKS
