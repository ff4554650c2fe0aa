from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes import torch_tpu
from tests.fakes.dumps import DUMPS
from tests.machine.machines import LONG, machine
from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.machine import environment
from tpunb.machine.machine import Machine, detect_machine
from tpunb.runs.spec import BackendName


def test_a_run_gets_its_device_and_loses_what_other_launchers_left() -> None:
    kernel = {"HOME": "/root", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}
    made = environment.run_environment(kernel, "CPU", {"LR": "0.1"})
    added = {"PJRT_DEVICE": "CPU", "PYTHONUNBUFFERED": "1", "TQDM_MININTERVAL": "0.5", "LR": "0.1"}
    assert made == {"HOME": "/root"} | added
    assert kernel == {"HOME": "/root", "RANK": "3", "WORLD_SIZE": "8", "MASTER_PORT": "1"}


PRESETS = [
    {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"},  # Kaggle
    {  # LeaderWorkerSet, KubeRay's webhook: one process for each host
        "TPU_PROCESS_ADDRESSES": "h0:8476,h1:8476",
        "TPU_PROCESS_PORT": "8476",
        "CLOUD_TPU_TASK_ID": "1",
    },
]


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("presets", PRESETS)
def test_what_is_meant_for_one_process_on_each_host_is_kept_for_that_alone(
    presets: dict[str, str], tmp_path: Path
) -> None:
    """torch_xla keeps set variables: 16 ranks would have the 4 addresses of their hosts."""
    grid = {"TPU_PROCESS_BOUNDS": "2,2,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1"}
    made = environment.run_environment({**presets, **grid}, "TPU")
    assert not (presets.keys() | grid.keys()) & made.keys()
    told = environment.run_environment({"TPU_SKIP_MDS_QUERY": "1", **grid}, "TPU")
    of_hosts = {"TPU_HOST_BOUNDS": "2,2,1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1"}
    assert told.items() >= of_hosts.items()
    assert not grid.keys() & told.keys()
    with machine("kaggle-tpu-batch", tmp_path) as fake:
        here = detect_machine(fake.env)
    spmd = environment.spmd_environment({**presets, **grid}, {}, here, 4, "cell [3]")
    assert spmd is not None
    assert spmd.env.items() >= {**presets, **grid}.items()


def test_a_rank_draws_into_files() -> None:
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    assert environment.run_environment(inline, "CPU")["MPLBACKEND"] == "Agg"
    assert environment.run_environment({"MPLBACKEND": "pdf"}, "CPU")["MPLBACKEND"] == "pdf"


def test_a_fork_server_s_libraries_have_all_processors() -> None:
    made = environment.fork_server_environment({"OMP_NUM_THREADS": "8", "HOME": "/h"})
    assert made == {"HOME": "/h"}


def test_what_a_warm_agent_cannot_change() -> None:
    env = {"PYTHONHASHSEED": "1", "LD_PRELOAD": "x.so", "XLA_FLAGS": "--x", "KMP_INIT_AT_FORK": "0"}
    assert environment.read_at_import(env).keys() == {"PYTHONHASHSEED", "LD_PRELOAD"}


def test_what_would_be_the_same_in_every_rank_is_removed() -> None:
    kernel = {
        "OMP_PROC_BIND": "true",
        "GOMP_CPU_AFFINITY": "0",
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_NAME": "my-tpu",
    }
    on_tpu = environment.run_environment(kernel, "TPU")
    assert not on_tpu.keys() & (kernel.keys() - {"TPU_NAME"})
    assert on_tpu["TPU_NAME"] == "my-tpu"
    assert (
        environment.run_environment(kernel, "CPU")["TPU_VISIBLE_CHIPS"] == "0"
    )  # it is nothing there
    assert all(change.reason for change in environment.environment_changes(kernel, "TPU"))
    asked = {"OMP_PROC_BIND": "close"}
    assert environment.run_environment(kernel, "TPU", asked)["OMP_PROC_BIND"] == "close"


@pytest.mark.usefixtures("starts_processes")
def test_programs_are_kept_on_a_tpu_only_and_where_the_person_says(tmp_path: Path) -> None:
    with machine("v5e-8", tmp_path) as made:
        here = detect_machine(made.env, patience=LONG)
        kept = environment.run_environment(made.env, "TPU", machine=here)
        assert kept["TPUNB_XLA_CACHE"] == str(made.root / "root/.cache/tpunb/xla/v5e")
        assert "TPUNB_XLA_CACHE" not in environment.run_environment(made.env, "CPU", machine=here)
        for name in ("TPUNB_XLA_CACHE", "XLA_PERSISTENT_CACHE_PATH"):
            own = environment.run_environment(made.env | {name: "/mine"}, "TPU", machine=here)
            assert own[name] == "/mine"
            assert [one for one in own if one.endswith(("XLA_CACHE", "CACHE_PATH"))] == [name]
        elsewhere = environment.run_environment(
            made.env | {"XDG_CACHE_HOME": "/c"}, "TPU", machine=here
        )
        assert elsewhere["TPUNB_XLA_CACHE"] == "/c/tpunb/xla/v5e"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("name", DUMPS)
def test_every_platforms_environment_is_a_new_dict_with_reasons(name: str, tmp_path: Path) -> None:
    with machine(name, tmp_path) as made:
        here = detect_machine(made.env, patience=LONG)
        before = dict(made.env)
        changes = environment.environment_changes(made.env, here.device, here)
        made_for_run = environment.run_environment(made.env, here.device, machine=here)
    assert made.env == before
    assert all(change.reason for change in changes)
    changed = {one for one in {*before, *made_for_run} if before.get(one) != made_for_run.get(one)}
    assert changed == {change.name for change in changes}
    assert made_for_run["PJRT_DEVICE"] == here.device
    # No remaining variable makes torch_xla query a server that cannot answer.
    if here.chips:
        assert made_for_run.get("TPU_SKIP_MDS_QUERY") or "ACCELERATOR_TYPE" in here.metadata.tpu_env


@pytest.mark.usefixtures("starts_processes")
def test_a_kernel_that_used_the_tpu_itself_does_not_leave_ranks_its_one_chip(
    tmp_path: Path,
) -> None:
    one_chip = {
        "TPU_VISIBLE_CHIPS": "0",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    with machine("gke", tmp_path) as made:
        here = detect_machine(made.env, patience=LONG)
        plain = environment.run_environment(made.env, "TPU", machine=here)
        assert environment.run_environment(made.env | one_chip, "TPU", machine=here) == plain


@pytest.mark.usefixtures("starts_processes")
def test_gkes_label_becomes_the_name_that_torch_xla_knows(tmp_path: Path) -> None:
    with machine("gke", tmp_path) as made:
        for label in ({"TPU_ACCELERATOR_TYPE": "tpu-v5-lite-podslice"}, {}):
            env = {k: v for k, v in made.env.items() if k != "TPU_ACCELERATOR_TYPE"}
            env |= label | {"TPU_TOPOLOGY": "4x4", "TPU_WORKER_HOSTNAMES": "h0,h1"}
            here = detect_machine(env)
            assert here.accelerator_type == "v5litepod-16"
            run = environment.run_environment(env, "TPU", machine=here)
            assert run["TPU_ACCELERATOR_TYPE"] == "v5litepod-16"
        assert not [
            change
            for change in environment.environment_changes(made.env, "TPU", detect_machine(made.env))
            if change.name == "TPU_ACCELERATOR_TYPE"
        ]


LAUNCHED = dict.fromkeys(environment.LAUNCH_VARIABLES, "from a cell")
OF_HOST = {**PRESETS[0], "TPU_PROCESS_PORT": "8476", "TPU_PROCESS_BOUNDS": "1,1,1"}
XLA = {"PJRT_DEVICE": "CPU", "XLA_USE_SPMD": "1", "TPU_VISIBLE_CHIPS": "0"}


def test_a_run_of_torchtpu_loses_what_is_for_others_and_gets_nothing_of_torch_xla() -> None:
    kernel = {"HOME": "/root", "RANK": "3", "TPU_SKIP_MDS_QUERY": "1", **LAUNCHED, **OF_HOST, **XLA}
    made = environment.run_environment(kernel, "TPU", backend="torchtpu")
    assert made == {
        "HOME": "/root",
        "TPUNB_BACKEND": "torchtpu",
        "TPUNB_DEVICE": "TPU",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONUNBUFFERED": "1",
        "TQDM_MININTERVAL": "0.5",
        "USE_TORCH_XLA": "0",  # which is installed here
    }
    own = {"XLA_USE_SPMD": "1", "USE_TORCH_XLA": "1"}
    asked = environment.run_environment(kernel, "TPU", own, backend="torchtpu")
    assert asked == {**made, **own}
    assert environment.run_environment(kernel | own, "TPU", backend="torch")["USE_TORCH_XLA"] == "1"


def test_a_topology_from_outside_is_that_of_the_whole_slice() -> None:
    pod = spmd_machine(device="TPU", chips=4, generation="v5e", workers=4)
    one = spmd_machine(device="TPU", chips=4, generation="v5e")
    kept = environment.run_environment(LAUNCHED, "TPU", machine=pod, backend="torchtpu")
    assert LAUNCHED.keys() & kept.keys() == {"TORCH_TPU_TOPOLOGY"}
    alone = environment.run_environment(LAUNCHED, "TPU", machine=one, backend="torchtpu")
    assert not LAUNCHED.keys() & alone.keys()


def test_the_process_of_each_device_has_a_port_for_its_load() -> None:
    v7x = spmd_machine(device="TPU", chips=4, generation="v7x", backend="torchtpu")
    made = environment.run_environment({}, "TPU", machine=v7x, backend="torchtpu")
    assert made["TPU_RUNTIME_METRICS_PORTS"].split(",")[-1] == "8438"  # two on each chip


@pytest.mark.parametrize("backend", ["torchtpu", "torch"])
def test_torch_tpu_is_not_loaded_without_its_tpu(
    backend: BackendName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed = backend == "torchtpu"  # where no other package may add its device either
    assert (AUTOLOAD in environment.run_environment({}, "CPU", backend=backend)) is rehearsed
    monkeypatch.syspath_prepend(torch_tpu.install_beside_torch(tmp_path))
    for stand_in in (False, True):  # of a kernel that rehearses the device
        if stand_in:
            monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
        for env in ({}, {AUTOLOAD: "1"}, {AUTOLOAD: "0"}):  # torch_tpu sets it to 1 itself
            assert environment.run_environment(env, "CPU", backend=backend)[AUTOLOAD] == "0"
            assert environment.run_environment(env, "TPU", backend=backend).get(AUTOLOAD) == (
                env.get(AUTOLOAD)
            )


def test_what_differs_in_every_launch_does_not_cost_a_warm_fork_server() -> None:
    env = {**LAUNCHED, "TORCH_TPU_TIER2_COMPILATION_CACHE": "mine"}
    assert environment.read_at_import(env).keys() == {"TORCH_TPU_TIER2_COMPILATION_CACHE"}


CELLS = "cell [3] calls use_spmd()"


def spmd_machine(**values: Any) -> Machine:
    cpu: dict[str, Any] = {
        "platform": "local",
        "device": "CPU",
        "chips": 0,
        "generation": "",
        "processors": 2,
        "memory": 2**34,
    }
    return Machine(**{**cpu, **values})


TPU = spmd_machine(platform="kaggle", device="TPU", chips=8, generation="v5e")


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
    found = environment.spmd_environment(kernel, asked, spmd_machine(), 4, cells)
    assert (None if found is None else found.why) == why


def test_on_cpu_the_process_has_as_many_devices() -> None:
    kernel = {"CPU_NUM_DEVICES": "2", "RANK": "1", "XLA_USE_SPMD": "1", "MINE": "x"}
    found = environment.spmd_environment(kernel, {"B": "2"}, spmd_machine(), 4, CELLS)
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
    found = environment.spmd_environment(kaggle, {}, TPU, 8, CELLS)
    assert found is not None
    assert found.cores == 8
    assert found.env["TPU_PROCESS_ADDRESSES"] == "local"
    assert not {"CPU_NUM_DEVICES", "TPU_VISIBLE_CHIPS"} & set(found.env)


def test_on_a_tpu_v3_it_drives_both_cores_of_each_chip() -> None:
    v3 = spmd_machine(platform="gcp-tpu-vm", device="TPU", chips=4, generation="v3")
    found = environment.spmd_environment({}, {}, v3, v3.default_cores, CELLS)
    assert found is not None
    assert found.cores == 8


def test_a_rank_of_a_rehearsal_has_one_device() -> None:
    assert "CPU_NUM_DEVICES=2" in str(
        environment.refused_variables({"CPU_NUM_DEVICES": "2"}, spmd_machine())
    )
    assert environment.refused_variables({"CPU_NUM_DEVICES": "1"}, spmd_machine()) is None
    assert environment.refused_variables({"CPU_NUM_DEVICES": "2"}, TPU) is None
