"""torch_xla's own code finds ranks and addresses in the environment of runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.dumps import DUMPS
from tests.fakes.metadata import FakeMetadataServer
from tests.machine.machines import LONG, machine
from tpunb.machine import environment
from tpunb.machine.machine import detect_machine

# torch_xla 2.9, _internal/tpu.py: what `device._own_chip` calls in a rank. The address of the
# metadata server is a constant there.
CODE = """\
import json, os, sys
from torch_xla._internal import tpu
told = []
for env, chips, server in json.loads(sys.argv[1]):
    tpu._GCE_METADATA_ROOT_URL = f"http://{server}/computeMetadata/v1"
    ranks = []
    for rank in range(chips):
        os.environ.clear()
        os.environ.update(env)
        (tpu.configure_one_chip_topology() if chips == 1 else tpu.configure_topology(rank, chips))
        ranks.append({k: v for k, v in os.environ.items() if k.startswith(("TPU_", "CLOUD_TPU_"))})
    os.environ.clear()
    os.environ.update(env)  # after a rank's own, worker_id() gives the rank where variables say it
    told.append([ranks, tpu.get_tpu_type(), tpu.version(), tpu.num_tpu_workers(), tpu.worker_id()])
print(json.dumps(told))
"""
EXPECTED = {
    # ranks of this host, their global numbers, bounds of the processes, type, version
    "v4-8": (range(4), "2,2,1", "v4", 4),
    "v5e-8": (range(8), "2,4,1", "v5litepod", 5),
    "v5e-16": (range(4, 8), "4,4,1", "v5litepod", 5),
    "v5p-8": (range(4), "2,2,1", "v5p", 5),
    "v6e-8": (range(8), "2,4,1", "v6e", 6),
    "kaggle-tpu": (range(8), "2,4,1", "v5litepod", 5),
    "kaggle-tpu-batch": (range(8), "2,4,1", "v5litepod", 5),
    "gke": (range(8), "2,4,1", "v5litepod", 5),
    "vertex": (range(4), "2,2,1", "v5litepod", 5),
    "container": (range(4), "2,2,1", "v4", 4),
    # one chip: no topology but its own
    "v5e-1": (range(1), "1,1,1", "v5litepod", 5),
    "colab-tpu": (range(1), "1,1,1", "v5litepod", 5),
}


@pytest.fixture(scope="module")
def found(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """torch_xla's results for all environments, from one process: its import takes seconds."""
    asked, servers = [], []
    for name in EXPECTED:
        dump = DUMPS[name]
        with machine(name, tmp_path_factory.mktemp(name)) as made:
            here = detect_machine(made.env, patience=LONG)
            env = environment.run_environment(made.env, here.device, machine=here)
        server = FakeMetadataServer(dump.metadata, "answers")
        servers.append(server.__enter__())
        asked.append([env, dump.chips, server.host])
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(asked)], capture_output=True, text=True
    )
    for server in servers:
        server.__exit__(None, None, None)
    assert done.returncode == 0, done.stderr
    # With a complete environment the metadata server is not queried.
    told = {name for name, server in zip(EXPECTED, servers, strict=True) if server.asked}
    assert told == {"v4-8", "v5e-1", "v5e-8", "v5e-16", "v5p-8", "v6e-8"}
    return dict(zip(EXPECTED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_tpu_environment_of_ranks_and_addresses(name: str, found: dict[str, Any]) -> None:
    numbers, bounds, kind, version = EXPECTED[name]
    ranks, *others = found[name]
    hosts = DUMPS[name].workers
    assert others == [kind, version, hosts, DUMPS[name].worker]
    assert [rank["TPU_VISIBLE_CHIPS"] for rank in ranks] == [str(n) for n in range(len(numbers))]
    for rank in ranks:
        assert rank["TPU_PROCESS_BOUNDS"] == bounds
        assert rank["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    if len(numbers) == 1:
        return
    assert [rank["CLOUD_TPU_TASK_ID"] for rank in ranks] == [str(n) for n in numbers]
    ports = [8476 + n for n in range(len(ranks))]
    assert [rank["TPU_PROCESS_PORT"] for rank in ranks] == [str(port) for port in ports]
    names = ["localhost"] if hosts == 1 else [f"10.128.0.{2 + n}" for n in range(hosts)]
    addresses = ",".join(f"{host}:{port}" for host in names for port in ports)
    assert {rank["TPU_PROCESS_ADDRESSES"] for rank in ranks} == {addresses}


@pytest.mark.usefixtures("starts_processes")
def test_tpu_environment_of_a_run_leaves_the_kernel_unchanged(tmp_path: Path) -> None:
    with machine("kaggle-tpu-batch", tmp_path) as made:
        before = dict(made.env)
        made_for_run = environment.run_environment(
            made.env, "TPU", machine=detect_machine(made.env)
        )
    assert made.env == before
    assert not {"TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID"} & made_for_run.keys()
