"""torch_xla's own code gives every rank of a slice its chip, whatever the platform has set.

Its metadata path runs for real: on a host that is a network namespace, at Google's name and port.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tests.fakes.metadata import FakeMetadataServer
from tpunb.backends.xla import topology

SERVER = "169.254.169.254"
"""The address of every Google machine's own metadata server."""


class Slice(NamedTuple):
    """A slice of 16 cores: hosts with 4 chips each."""

    hosts: int
    host_bounds: str
    process_bounds: str


SLICES = {
    "v5litepod-16": Slice(4, "2,2,1", "4,4,1"),
    "v6e-16": Slice(4, "2,2,1", "4,4,1"),
    "v5p-16": Slice(2, "1,1,2", "2,2,2"),
    "tpu7x-16": Slice(2, "1,1,2", "2,2,2,2"),
}
LOCAL = 4
RANKS = [(kind, worker) for kind, one in SLICES.items() for worker in range(one.hosts)]


def addresses(kind: str) -> list[str]:
    return [f"10.128.0.{host + 2}" for host in range(SLICES[kind].hosts)]


def metadata(kind: str, worker: int) -> dict[str, str]:
    """The values of a host's metadata server."""
    env = {
        "ACCELERATOR_TYPE": kind,
        "CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "HOST_BOUNDS": SLICES[kind].host_bounds,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": SLICES[kind].host_bounds,
        "WORKER_ID": str(worker),
    }
    return {
        "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in env.items()),
        "worker-network-endpoints": ",".join(f"unused:8470:{ip}" for ip in addresses(kind)),
    }


def variables(kind: str, worker: int) -> dict[str, str]:
    """The variables that GKE's device plugin and webhook set in a container."""
    return {
        "TPU_SKIP_MDS_QUERY": "true",
        "TPU_ACCELERATOR_TYPE": kind,
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
        "TPU_HOST_BOUNDS": SLICES[kind].host_bounds,
        "TPU_WORKER_HOSTNAMES": ",".join(addresses(kind)),
        "TPU_WORKER_ID": str(worker),
    }


def presets(kind: str, worker: int) -> dict[str, str]:
    """The variables that LeaderWorkerSet sets in addition (and KubeRay's webhook on v7x)."""
    return {
        "TPU_PROCESS_ADDRESSES": ",".join(f"{ip}:8476" for ip in addresses(kind)),
        "TPU_PROCESS_PORT": "8476",
        "TPU_NAME": "my-set",
    }


def of_processes(kind: str, worker: int) -> dict[str, str]:
    """Variables that torch_xla reads first for facts about hosts, but that are about a process."""
    env = variables(kind, worker)
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": kind,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": SLICES[kind].host_bounds,
        "TPU_WORKER_HOSTNAMES": env["TPU_WORKER_HOSTNAMES"],
        "CLOUD_TPU_TASK_ID": str(worker),
    }


WAYS: dict[str, Any] = {
    "metadata": lambda kind, worker: {},
    "metadata, presets": presets,
    "GKE": variables,
    "GKE, LeaderWorkerSet": lambda kind, worker: variables(kind, worker) | presets(kind, worker),
    "variables of processes": of_processes,
}


def _look() -> None:
    """On a host with a metadata server: the variables of each rank of each slice, as JSON."""
    from tpunb.backends.base import RankSetup
    from tpunb.backends.xla import xla_device

    kept = {"PATH": os.environ["PATH"], "PJRT_DEVICE": "TPU", "TPUNB_ADDRESS": SERVER}
    found = []
    with FakeMetadataServer({}, "answers", (SERVER, 80)) as server:
        for way, make in WAYS.items():
            for kind, worker in RANKS:
                server.values = (
                    {} if "TPU_SKIP_MDS_QUERY" in make(kind, 0) else metadata(kind, worker)
                )
                ranks = []
                for local_rank in range(LOCAL):
                    os.environ.clear()
                    os.environ.update({**kept, **make(kind, worker)})
                    world = LOCAL * SLICES[kind].hosts
                    xla_device.prepare_device(RankSetup("TPU", 0, world, local_rank, LOCAL))
                    ranks.append({name: os.environ[name] for name in os.environ if "TPU_" in name})
                found.append([way, kind, worker, ranks])
        os.environ.clear()
        spmd = {**kept, **variables("v6e-16", 2), **presets("v6e-16", 2)}
        os.environ.update(spmd)
        xla_device.prepare_device(RankSetup("TPU", 2, 4, 0, 1, 4))
        found.append(dict(os.environ) == spmd)
        found.append(sorted(set(server.asked)))
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(starts_processes: None) -> list[Any]:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    with Pod(1) as pod:
        pod[0].run(["ip", "addr", "add", f"{SERVER}/32", "dev", "lo"], check=True)
        pod[0].know({"localhost": "127.0.0.1", "metadata.google.internal": SERVER})
        command = [sys.executable, "-m", __name__]
        done = pod[0].run(command, {"PJRT_DEVICE": "TPU", "TPUNB_XLA_CACHE": "off"}, timeout=240)
    assert done.returncode == 0, done.stderr
    every: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return every


def test_every_rank_of_every_slice_has_its_own_chip(found: list[Any]) -> None:
    *ranks, _, _ = found
    assert [(kind, worker) for _, kind, worker, _ in ranks] == RANKS * len(WAYS)
    for way, kind, worker, told in ranks:
        ports = range(8476, 8476 + LOCAL)
        every = ",".join(f"{ip}:{port}" for ip in addresses(kind) for port in ports)
        for local_rank, env in enumerate(told):
            expected = {
                "CLOUD_TPU_TASK_ID": str(worker * LOCAL + local_rank),
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_ADDRESSES": every,
                "TPU_PROCESS_BOUNDS": SLICES[kind].process_bounds,
                "TPU_PROCESS_PORT": str(8476 + local_rank),
                "TPU_VISIBLE_CHIPS": str(local_rank),
            }
            assert expected.items() <= env.items(), (way, kind, worker, local_rank, env)


def test_a_process_that_drives_a_whole_host_keeps_what_the_platform_has_set(
    found: list[Any],
) -> None:
    *_, unchanged, asked = found
    assert unchanged
    names = ("tpu-env", "worker-network-endpoints")
    assert asked == [f"instance/attributes/{name}" for name in names]


@pytest.mark.parametrize(
    ("env", "changed"),
    [
        (
            {"TPU_PROCESS_ADDRESSES": "local", "CLOUD_TPU_TASK_ID": "0"},
            {"TPU_PROCESS_ADDRESSES": None, "CLOUD_TPU_TASK_ID": None},
        ),
        ({"TPU_PROCESS_BOUNDS": "2,2,1", "TPU_WORKER_ID": "1"}, {"TPU_PROCESS_BOUNDS": None}),
        (
            {"TPU_SKIP_MDS_QUERY": "1", "CLOUD_TPU_TASK_ID": "3", "TPU_WORKER_ID": "1"},
            {"CLOUD_TPU_TASK_ID": None, "TPU_WORKER_ID": "3"},
        ),
    ],
)
def test_what_is_changed_for_torch_xla(
    env: Mapping[str, str], changed: Mapping[str, str | None]
) -> None:
    assert topology.changes(env) == changed


if __name__ == "__main__":
    _look()
