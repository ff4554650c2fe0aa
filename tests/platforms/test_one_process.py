"""The environment of a run of SPMD, also on machines that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from tpunb.platforms import one_process
from tpunb.platforms.machine import Machine

CELLS = "cell [3] calls use_spmd()"


def machine(**values: Any) -> Machine:
    cpu: dict[str, Any] = {
        "platform": "local", "device": "CPU", "chips": 0, "generation": "", "processors": 2,
        "memory": 2**34,
    }  # fmt: skip
    return Machine(**{**cpu, **values})


TPU = machine(platform="kaggle", device="TPU", chips=8, generation="v5e")


@pytest.mark.parametrize(
    ("kernel", "asked", "cells", "why"),
    [
        ({}, {}, None, None),
        ({}, {}, CELLS, CELLS),
        ({"XLA_USE_SPMD": "1"}, {}, CELLS, CELLS),
        ({"XLA_USE_SPMD": "1"}, {}, None, "XLA_USE_SPMD is set in the kernel's environment"),
        ({"XLA_USE_SPMD": "0"}, {}, None, None),
        ({}, {"XLA_USE_SPMD": "1"}, None, "--env XLA_USE_SPMD=1"),
        ({}, {"XLA_USE_SPMD": "true"}, CELLS, "--env XLA_USE_SPMD=true"),
        ({"XLA_USE_SPMD": "1"}, {"XLA_USE_SPMD": "0"}, CELLS, None),
    ],
)
def test_what_makes_a_run_one_of_spmd(
    kernel: dict[str, str], asked: dict[str, str], cells: str | None, why: str | None
) -> None:
    found = one_process.look(kernel, asked, machine(), 4, cells)
    assert (None if found is None else found.why) == why


def test_on_cpu_the_process_has_as_many_devices() -> None:
    kernel = {"CPU_NUM_DEVICES": "2", "RANK": "1", "XLA_USE_SPMD": "1", "MINE": "x"}
    found = one_process.look(kernel, {"B": "2"}, machine(), 4, CELLS)
    assert found is not None
    assert found.cores == 4
    assert found.env["CPU_NUM_DEVICES"] == "4"
    assert (found.env["MINE"], found.env["B"]) == ("x", "2")
    # The cells find SPMD off, as they did in the kernel: xr.use_spmd() would complain.
    assert not {"RANK", "XLA_USE_SPMD"} & set(found.env)
    changes = {change.name: change.value for change in found.changes}
    assert changes["CPU_NUM_DEVICES"] == "4"
    assert changes["XLA_USE_SPMD"] is None


def test_on_a_tpu_the_process_has_all_chips() -> None:
    kaggle = {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0", "TPU_VISIBLE_CHIPS": "0"}
    found = one_process.look(kaggle, {}, TPU, 8, CELLS)
    assert found is not None
    assert found.cores == 8
    assert found.env["TPU_PROCESS_ADDRESSES"] == "local"
    assert not {"CPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS"} & set(found.env)


def test_on_a_tpu_v3_it_drives_both_cores_of_each_chip() -> None:
    v3 = machine(platform="gcp-tpu-vm", device="TPU", chips=4, generation="v3")
    found = one_process.look({}, {}, v3, v3.default_cores, CELLS)
    assert found is not None
    assert found.cores == 8


def test_a_rank_of_a_rehearsal_has_one_device() -> None:
    assert "CPU_NUM_DEVICES=2" in str(one_process.refused({"CPU_NUM_DEVICES": "2"}, machine()))
    assert one_process.refused({"CPU_NUM_DEVICES": "1"}, machine()) is None
    assert one_process.refused({"CPU_NUM_DEVICES": "2"}, TPU) is None
