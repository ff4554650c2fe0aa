"""Deadlocks of ranks that wait for each other in different groups; late ranks are not one."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse
from tpunb.backends.rehearsal.errors import CollectiveError


def wait(*members: int, number: int = 1, **others: int) -> tuple[Any, ...]:
    """The fields of a wait in exchange `number`; `g01=2`: the rank began two in that of 0 and 1."""
    name = "-".join(map(str, members))
    before = {"-".join(group[1:]): count for group, count in others.items()}
    return name, members, {**before, name: number}, ""


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ({0: wait(0, 1), 1: wait(0, 1)}, []),
        ({0: wait(0, 1)}, []),
        ({0: wait(0, 1), 1: wait(1, 2)}, []),
        ({0: wait(0, 1, 2), 2: wait(0, 2)}, [0, 2]),
        # The first exchange of rank 0's group has ended for both: rank 1 waits for no waiting rank.
        ({0: wait(0, 1, number=2), 1: wait(1, 2, g01=2)}, []),
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(0, 2)}, [0, 1, 2]),
        # Rank 0 is not in the circle, and waits for it.
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(1, 2, 3), 3: wait(3, 4)}, [0, 1, 2, 3]),
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(2, 3), 3: wait(3, 4)}, []),
    ],
)
def test_deadlock_cycle_detection(waits: dict[int, Any], found: list[int]) -> None:
    from tpunb.backends.rehearsal.waiting import Wait, find_cycle

    waits = {rank: Wait(*fields) for rank, fields in waits.items()}
    assert sorted(find_cycle(0, waits[0], waits.get)) == found
    for rank, said in waits.items():
        assert Wait.from_json(said.to_json()).lacks(waits[0]) == said.lacks(waits[0]), rank


def sent_in_a_circle() -> str:
    rank, world = rehearse()
    import warnings

    dist.init_process_group("xla", init_method="xla://")
    x = torch.full((3,), float(rank), device=torch_xla.device())
    with warnings.catch_warnings(record=True) as said:
        try:
            dist.send(x, (rank + 1) % world)
        except CollectiveError as error:
            return f"{said[0].message} {type(error).__name__}: {error}"
    return ""


def test_deadlock_of_sending_ranks_is_named(ranks: Ranks) -> None:
    said = ranks.values(sent_in_a_circle, 4)
    deadlocks = [text for text in said if "DeadlockError: " in text]
    assert deadlocks
    for text in deadlocks:
        for rank in range(4):
            assert f"rank {rank}: collective_permute of float32[3]" in text
    assert all("on two ranks, but XLA compiles it for all 4" in text for text in said)


def passed_on() -> float:
    rank, _ = rehearse()
    dist.init_process_group("xla", init_method="xla://")
    x = torch.full((3,), 1.0 + rank, device=torch_xla.device())
    for source, target in ([0, 1], [1, 2]) if rank < 2 else ([1, 2],):
        time.sleep(0.9 * rank)  # the others wait for longer than they do without telling
        if rank == source:
            dist.send(x, target)
        elif rank == target:
            received = torch.zeros_like(x)
            dist.recv(received, source)
            x = x + received
    value: float = xm.all_reduce("sum", x).mean().item()
    return value


def test_no_deadlock_if_a_late_rank_arrives(ranks: Ranks) -> None:
    # 1 is sent to 2, their sum to 3.
    assert ranks.values(passed_on, 3) == [1.0 + 3.0 + 6.0] * 3
