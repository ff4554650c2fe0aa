"""Fake TPU VMs with their metadata servers, and a stand-in for gcloud that knows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.dumps import DUMPS, build
from tests.fakes.gcloud import FakeGcloud, install
from tests.fakes.machine import FakeMachine
from tests.fakes.metadata import FakeMetadataServer

PLACE = "my-project/us-central1-a/my-tpu"
ADDRESS = "10.128.0.2"


@contextmanager
def tpu_vm(root: Path, dump: str = "v6e-8", **changed: str) -> Iterator[FakeMachine]:
    """A VM from the dumps, with the keys that identify it. `changed`: keys of its `tpu-env`."""
    told = dict(DUMPS[dump].metadata)
    told["instance/network-interfaces/0/ip"] = ADDRESS
    told["tpu-env"] += "CONSUMER_PROJECT_ID: 'my-project'\n"
    lines = [line for line in told["tpu-env"].splitlines() if line.partition(":")[0] not in changed]
    told["tpu-env"] = "\n".join([*lines, *(f"{k}: '{v}'" for k, v in changed.items())])
    with build(DUMPS[dump], root) as made, FakeMetadataServer(told) as server:
        made.env["GCE_METADATA_HOST"] = server.host
        yield made


def gcloud(folder: Path, **node: object) -> FakeGcloud:
    """A folder with a stand-in for gcloud that knows the VM; put it first on PATH."""
    made = install(folder)
    values = {
        "name": "projects/my-project/locations/us-central1-a/nodes/my-tpu",
        "state": "READY",
        "acceleratorType": "v6e-8",
        "networkEndpoints": [{"ipAddress": ADDRESS, "port": 8470}],
        "schedulingConfig": {},
    }
    made.put(PLACE, **(values | node))
    return made


def path_with(made: FakeGcloud) -> str:
    """A PATH without another gcloud."""
    return f"{made.folder}:{os.environ['PATH']}"
