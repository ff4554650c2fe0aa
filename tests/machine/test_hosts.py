"""The identity of a host, from the variables that each platform sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.fakes.dumps import DUMPS
from tests.fakes.metadata import FakeMetadataServer
from tpunb.machine import hosts
from tpunb.machine.hosts import PORT, Identity
from tpunb.machine.metadata import Metadata, read_all
from tpunb.utils.errors import SetupError

VERTEX = json.dumps(
    {
        "cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"]},
        "task": {"type": "workerpool1", "index": 1},
        "environment": "cloud",
    }
)


def _nobody() -> Metadata:
    raise AssertionError("the metadata server was asked")


@pytest.mark.parametrize(
    ("env", "flags", "expected"),
    [
        pytest.param(
            {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "t-0.t,t-1.t,t-2.t,t-3.t"},
            {},
            (4, 3, "t-0.t", PORT, "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"),
            id="GKE",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2"},
            {"nnodes": 4, "rendezvous": "set-job-0-0.set:29400"},
            (4, 2, "set-job-0-0.set", 29400, "JOB_COMPLETION_INDEX"),
            id="JobSet",
        ),
        pytest.param(
            {
                "SKYPILOT_NODE_RANK": "1",
                "SKYPILOT_NODE_IPS": "10.0.0.10\n10.0.0.2\n",
                "SKYPILOT_NUM_NODES": "2",
            },
            {},
            (2, 1, "10.0.0.10", PORT, "SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS"),
            id="SkyPilot",
        ),
        pytest.param(
            {"CLUSTER_SPEC": VERTEX}, {}, (3, 2, "a-0", PORT, "CLUSTER_SPEC"), id="Vertex"
        ),
        pytest.param(
            {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b,c,d"},
            {"nnodes": 2, "node_rank": 1, "rendezvous": "10.0.0.2:29400"},
            (2, 1, "10.0.0.2", 29400, "flags"),
            id="flags come first",
        ),
        pytest.param(
            {
                "TPU_WORKER_ID": "1",
                "TPU_WORKER_HOSTNAMES": "a,b",
                "JOB_COMPLETION_INDEX": "0",
                "SKYPILOT_NODE_RANK": "0",
                "SKYPILOT_NODE_IPS": "10.0.0.2",
            },
            {},
            (2, 1, "a", PORT, "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"),
            id="the first that says it",
        ),
        pytest.param({}, {"nnodes": 1}, (1, 0, "127.0.0.1", PORT, "flags"), id="one host"),
        pytest.param(
            {"TPU_WORKER_ID": "0"},
            {"nnodes": 2, "node_rank": 0, "rendezvous": "[fd00::2]:29400"},
            (2, 0, "fd00::2", 29400, "flags"),
            id="IPv6",
        ),
    ],
)
def test_each_platform_says_which_host_this_is(
    env: Mapping[str, str], flags: dict, expected: tuple
) -> None:
    found = hosts.identify(env, _nobody, **flags)
    assert (found.nnodes, found.node_rank, found.leader, found.port, found.source) == expected


def test_a_cloud_tpu_vm_says_it_by_its_metadata_server(tmp_path: Path) -> None:
    with FakeMetadataServer(DUMPS["v5e-16"].metadata) as server:
        env = {"GCE_METADATA_HOST": server.host}
        found = hosts.identify(env, lambda: read_all(env, tmp_path, 10))
    assert (found.nnodes, found.node_rank, found.source) == (4, 1, "the metadata server")
    assert found.hosts == tuple(f"10.128.0.{number}" for number in range(2, 6))
    assert hosts.with_addresses(found) == Identity(
        4, 1, "10.128.0.2", PORT, "the metadata server", found.hosts, "10.128.0.3"
    )


def test_where_nobody_says_anything_it_is_one_host() -> None:
    found = hosts.identify({}, Metadata)
    assert (found.nnodes, found.node_rank, found.leader) == (1, 0, "127.0.0.1")
    assert found.source == "the default: no source names other hosts"


@pytest.mark.parametrize(
    ("env", "flags", "message"),
    [
        (
            {"JOB_COMPLETION_INDEX": "2"},
            {},
            "this is host 2 (from JOB_COMPLETION_INDEX): give --nnodes as well",
        ),
        (
            {"JOB_COMPLETION_INDEX": "2"},
            {"nnodes": 4},
            "the address of host 0 is not known (from JOB_COMPLETION_INDEX): give --rendezvous HO",
        ),
        (
            {"JOB_COMPLETION_INDEX": "4"},
            {"nnodes": 4, "rendezvous": "a"},
            "node rank 4 (from JOB_COMPLETION_INDEX): with 4 hosts it must be from 0 to 3",
        ),
        (
            {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"},
            {"nnodes": 4},
            "--nnodes 4 contradicts the number of hosts from TPU_WORKER_ID and "
            "TPU_WORKER_HOSTNAMES: 2",
        ),
        (
            {"TPU_WORKER_ID": "one", "TPU_WORKER_HOSTNAMES": "a,b"},
            {},
            "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES: 'one' is not a host number",
        ),
        ({"CLUSTER_SPEC": '{"cluster": {}}'}, {}, "CLUSTER_SPEC cannot be read: 'task'"),
        ({}, {"nnodes": 2, "node_rank": 1, "rendezvous": "a:b"}, "--rendezvous a:b: it must be"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    env: Mapping[str, str], flags: dict, message: str
) -> None:
    with pytest.raises(SetupError) as caught:
        hosts.identify(env, Metadata, **flags)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("identity", "address"),
    [
        (Identity(2, 0, "h0", PORT, "flags", (), "10.0.0.2"), "10.0.0.2"),  # as given
        (Identity(2, 1, "127.0.0.1", PORT, "flags"), "127.0.0.1"),
        (Identity(2, 0, "h0", PORT, "SkyPilot", ("10.0.0.2", "10.0.0.3")), "10.0.0.2"),
    ],
)
def test_known_addresses_are_not_looked_up(identity: Identity, address: str) -> None:
    look_up = None if identity.leader == "127.0.0.1" else _refuse
    assert hosts.with_addresses(identity, look_up).address == address


def test_a_name_of_host_0_that_leads_nowhere_is_refused() -> None:
    """Debian's /etc/hosts has such an entry."""
    with pytest.raises(SetupError, match=r"h0 is 127.0.1.1 on this machine, where no other"):
        hosts.with_addresses(Identity(2, 0, "h0", PORT, "flags"), lambda name: "127.0.1.1")
    with pytest.raises(SetupError, match=r"host 0, no-such-name.invalid, does not resolve"):
        hosts.with_addresses(Identity(2, 1, "no-such-name.invalid", PORT, "flags"))


def _refuse(name: str) -> str:
    raise AssertionError(f"{name} was looked up")
