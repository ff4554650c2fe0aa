"""A pod that ssh and gcloud reach: hosts of `tests.fakes.hosts` behind their stand-ins."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tests.fakes
from tests.drivers.places import write_places
from tests.fakes.hosts import Host, Pod
from tests.fakes.machine import FakeMachine

ROOT = Path(__file__).parents[2]
TORCHLESS = """\
import sys
if sys.orig_argv[1:4] == ["-m", "tpunb", "node"]:
    from tests.fakes import torchless
    torchless.install()
"""
FAKES = Path(next(iter(tests.fakes.__path__)))


class ReachedPod:
    """The hosts, their homes, and a project with a `places.toml` that names them."""

    def __init__(self, pod: Pod, folder: Path) -> None:
        self.pod = pod
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        self.log = folder / "calls.jsonl"
        self._bin = folder / "bin"
        self._bin.mkdir()
        for tool in ("ssh", "gcloud"):
            (self._bin / tool).symlink_to(FAKES / tool)
        self._said: dict[str, dict[str, Any]] = {host.name: {} for host in pod.hosts}
        self._write()
        self.set_place()

    def __getitem__(self, number: int) -> Host:
        return self.pod[number]

    @property
    def names(self) -> list[str]:
        return [host.name for host in self.pod.hosts]

    def _write(self) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin", "/usr/sbin"])
        entries = {
            host.name: {
                "enter": host.enter(),
                "address": host.address,
                "home": str(host.home),
                "path": path,
                **self._said[host.name],
            }
            for host in self.pod.hosts
        }
        (self.folder / "hosts.json").write_text(json.dumps(entries))

    def change(self, host: str, **values: Any) -> None:
        """What the stand-in does with a host: `refuses`, `env`, `path`; None takes it back."""
        kept = {**self._said[host], **values}
        self._said[host] = {name: value for name, value in kept.items() if value is not None}
        self._write()

    def without_torch(self) -> None:
        """On every host, `python -m tpunb node` has ranks that are plain Python and start at once.

        See `tests.fakes.torchless`.
        """
        folder = self.folder / "torchless"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(TORCHLESS)
        for host in self.names:
            self.change(host, env={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"})

    def set_place(self, **values: Any) -> None:
        """Write `places.toml`: the place `pod`, with ssh and this interpreter if not said."""
        made = {"kind": "ssh", "python": sys.executable, **values}
        if made["kind"] == "ssh":
            made.setdefault("hosts", self.names)
        write_places(self.project, pod=made)

    def environment(self) -> dict[str, str]:
        """Variables with which the stand-ins are found."""
        return {
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "TPUNB_FAKE_HOSTS": str(self.folder / "hosts.json"),
            "TPUNB_FAKE_CLOUD": str(self.folder / "cloud.json"),
            "TPUNB_FAKE_LOG": str(self.log),
        }

    def set_cloud(self, cloud: Mapping[str, Any]) -> None:
        """What gcloud knows: see `tests/fakes/gcloud`."""
        (self.folder / "cloud.json").write_text(json.dumps(cloud))

    def calls(self) -> list[list[str]]:
        """What ssh and gcloud were called with, so far."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def left(self) -> list[int]:
        """Processes on any host."""
        return [pid for host in self.pod.hosts for pid in host.processes()]

    def wait_until_empty(self, patience: float = 60.0) -> None:
        """Wait until no process is left on any host; fails, with their commands, if one stays."""
        deadline = time.monotonic() + patience
        while left := self.left():
            if time.monotonic() > deadline:
                names = [Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in left]
                raise AssertionError(f"left on the hosts: {names}")
            time.sleep(0.02)


@contextmanager
def reached_pod(hosts: int, folder: Path) -> Iterator[ReachedPod]:
    """Hosts for as long as the block runs."""
    with Pod(hosts, folder / "homes") as pod:
        yield ReachedPod(pod, folder)


def tpu(folder: Path, worker: int, *, chips: int = 4) -> dict[str, str]:
    """Variables that make a host a TPU's."""
    machine = FakeMachine(folder)
    machine.chips("v5e", chips)
    hosts = "10.77.0.2,10.77.0.3"
    return {
        "TPUNB_ROOT": str(folder),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": hosts,
    }
