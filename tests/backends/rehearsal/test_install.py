"""Ranks of plain torch with gloo, in each version of torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.drivers.devices import rehearse_on
from tests.drivers.ranks import Ranks
from tpunb.backends.rehearsal.errors import CollectiveError, is_of_torch_distributed
from tpunb.backends.rehearsal.install import leave_rehearsal, memory_info

# Functions without `test_` run in ranks; each is followed by the test that calls it.


def reduced() -> list[float]:
    rank, _ = rehearse_on("cpu")
    found = []
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, op=operation)
        found.append(x.item())
    dist.barrier()
    return found


def test_gloo_reduces_as_ever(ranks: Ranks) -> None:
    assert ranks.values(reduced, 4) == [[10.0, 4.0, 2.5]] * 4


def meets_nobody() -> str:
    if int(os.environ["RANK"]) == 0:
        try:
            rehearse_on("cpu")
        except CollectiveError as error:
            return str(error)
    from tests.drivers.ranks import rehearse

    rehearse("tpunb.backends.rehearsal.install")
    leave_rehearsal()
    time.sleep(2)
    return ""


def test_a_rank_that_misses_init_process_group_is_named(ranks: Ranks) -> None:
    message, _ = ranks.values(meets_nobody, 2)
    assert "rank 1 has returned from the train cell" in message
    assert "rank 0 waited in init_process_group" in message


def of_a_collective() -> list[bool]:
    rehearse_on("cpu")
    found = []
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND),
        lambda: dist.device_mesh.init_device_mesh("cpu", (1, 2)).get_group(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as raised:
            call()
        found.append(is_of_torch_distributed(raised.value))
    return found


def test_which_errors_may_come_from_a_lost_peer(ranks: Ranks) -> None:
    assert ranks.values(of_a_collective, 2) == [[True, False]] * 2


def test_memory_of_a_rank() -> None:
    info = memory_info(2)
    assert 50e6 < info["bytes_used"] <= info["peak_bytes_used"]
    assert info["bytes_used"] < info["bytes_limit"]
