"""A rank's view of itself and its machine, and its share of the processors."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.drivers.lazy import torch_xla, xm, xr
from tests.drivers.ranks import Ranks, rehearse


def facts() -> dict[str, Any]:
    rehearse()
    info = xm.get_memory_info()
    assert xm.get_memory_info(torch_xla.device()).keys() == info.keys()
    assert 50e6 < info["bytes_used"] <= info["peak_bytes_used"]
    assert info["bytes_used"] < info["bytes_limit"]
    return {
        "addressable": xr.addressable_device_count(),
        "local": xr.local_device_count(),
        "runtime": xr.addressable_runtime_device_count(),
        "global": xr.global_runtime_device_count(),
        "processes": (xr.process_count(), xr.local_process_count(), xr.process_index()),
        "type": xr.device_type(),
        "hardware": xm.xla_device_hw(torch_xla.device()),
        "devices": xm.get_xla_supported_devices(),
        "master": (xm.is_master_ordinal(), xm.is_master_ordinal(local=False)),
        "ordinals": (xr.global_ordinal(), xr.local_ordinal()),
        "spmd": xr.is_spmd(),
        "keys": sorted(info),
        "threads": os.environ["PJRT_NPROC"],
    }


def test_rank_sees_torch_xla_runtime_facts_like_on_a_tpu(ranks: Ranks) -> None:
    processors = len(os.sched_getaffinity(0))
    for rank, found in enumerate(ranks.values(facts, 3)):
        assert found == {
            "addressable": 1,  # one core for each process, as on a TPU
            "local": 3,
            "runtime": 1,
            "global": 3,
            "processes": (3, 3, rank),
            "type": "CPU",  # no pretence
            "hardware": "CPU",
            "devices": ["xla:0"],
            "master": (rank == 0, rank == 0),
            "ordinals": (rank, rank),
            "spmd": False,
            "keys": ["bytes_limit", "bytes_used", "peak_bytes_used"],
            "threads": str(max(1, processors // 3)),
        }


def drawn(seed: str) -> list[list[float]]:
    rank, _ = rehearse()
    device = torch_xla.device()
    if seed == "torch":
        torch.manual_seed(3)
    if seed == "torch_xla":
        torch_xla.manual_seed(3 + rank)
    if seed == "state":
        xm.set_rng_state(3 + rank)
        assert xm.get_rng_state() == 3 + rank
    return [torch.rand(3, device=device).tolist(), torch.rand(3).tolist()]


@pytest.mark.parametrize("seed", ["none", "torch", "torch_xla", "state"])
def test_random_numbers_of_ranks_are_equal_until_seeded_apart(ranks: Ranks, seed: str) -> None:
    (first, cpu), (second, other_cpu) = ranks.values(drawn, 2, seed)
    # As on a TPU: each process begins with the same default seed on its device.
    assert (first == second) == (seed in ("none", "torch"))
    assert cpu == other_cpu  # forked from one process


def threads() -> int:
    rehearse()
    x = torch.ones(64, 64, device=torch_xla.device())
    (x @ x).sum().item()
    return len(os.listdir("/proc/self/task"))


def test_ranks_share_the_processors(ranks: Ranks) -> None:
    few = ranks.values(threads, 2)
    many = ranks.values(threads, 2, PJRT_NPROC="16")
    for rank in range(2):
        assert few[rank] <= many[rank] - 2 * (16 - len(os.sched_getaffinity(0)))


def test_thread_settings_of_the_user_are_kept() -> None:
    from tpunb.backends.xla.rehearsal import install_xla

    for said in install_xla.THREADS:
        env = {said: "7"}
        install_xla.share_processors(env, 4)
        assert env == {said: "7"}
