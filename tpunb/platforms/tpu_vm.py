"""The TPU VM that this process runs on, as Google Cloud names it, and how it is stopped.

Which machine this is comes from its own metadata server, and Google Cloud must say the same of
it: nothing is stopped by a name that somebody has typed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tpunb.errors import SetupError
from tpunb.platforms import metadata
from tpunb.platforms.machine import Machine

PATIENCE = 120.0
"""Seconds that gcloud may take: it is slow to start."""

_ELSEWHERE = {
    "kaggle": "a Kaggle session: it costs quota, and ends with «Stop session», or with a batch run",
    "colab": (
        "a Colab runtime: `from google.colab import runtime; runtime.unassign()` in the last cell "
        "gives it back"
    ),
    "gke": "a container of GKE: its machine goes when the job or node pool does",
    "vertex": "a machine of Vertex AI: a job ends by itself, a workbench is stopped on its page",
}


@dataclass(frozen=True)
class TpuVm:
    """A TPU VM of one host."""

    name: str
    zone: str
    project: str
    accelerator_type: str
    address: str
    """Its address in its network: no other machine there has it."""

    def to_json(self) -> dict[str, str]:
        """A dict of plain JSON values."""
        return asdict(self)

    def command(self, verb: str) -> list[str]:
        """The words for gcloud."""
        place = [f"--zone={self.zone}", f"--project={self.project}", "--quiet"]
        return ["compute", "tpus", "tpu-vm", verb, self.name, *place]

    def describe(self) -> dict[str, Any]:
        """What Google Cloud says of it. Raises SetupError if it may not be asked."""
        found: dict[str, Any] = json.loads(gcloud([*self.command("describe"), "--format=json"]))
        return found

    def check(self) -> None:
        """Raise SetupError unless Google Cloud has this machine under this name, and can stop it.

        `projects.locations.nodes.stop` «is only available with single TPU nodes» (Cloud TPU API,
        reference), and a spot VM cannot be started again (Cloud TPU, Manage TPU Spot VMs).
        """
        node = self.describe()
        endpoints = node.get("networkEndpoints", [])
        if len(endpoints) > 1:
            raise _refused(_pod(len(endpoints)))
        addresses = [one.get("ipAddress") for one in endpoints]
        if addresses != [self.address] or node.get("acceleratorType") != self.accelerator_type:
            raise _refused(
                f"Google Cloud has another machine under the name {self.name} in {self.zone}: "
                f"{node.get('acceleratorType')} at {', '.join(map(str, addresses))}, and not this "
                f"{self.accelerator_type} at {self.address}"
            )
        scheduling = node.get("schedulingConfig", {})
        if scheduling.get("spot") or scheduling.get("preemptible"):
            raise _refused(_spot(self))
        if node.get("state") != "READY":
            raise _refused(f"{self.name} is {node.get('state')}, and not READY")

    def stop(self) -> None:
        """Stop it; its disks stay. Raises SetupError if gcloud cannot."""
        gcloud([*self.command("stop"), "--async"])


def ours(machine: Machine, env: Mapping[str, str]) -> TpuVm:
    """The TPU VM that this is. Raises SetupError, with the reason, if it is none to be stopped."""
    if machine.platform in _ELSEWHERE:
        raise _refused(f"this is {_ELSEWHERE[machine.platform]}")
    told = machine.metadata
    if machine.platform != "gcp-tpu-vm" or told.state != "answers":
        raise _refused(
            "this is not known to be a TPU VM of Google Cloud "
            f"({machine.kind}; metadata server: {told.state})"
        )
    if machine.workers > 1:
        raise _refused(_pod(machine.workers))
    given = told.tpu_env
    name, zone, project = (given.get(k, "") for k in ("NODE_ID", "ZONE", "CONSUMER_PROJECT_ID"))
    if not given.get("ACCELERATOR_TYPE") or name in ("", "0"):
        # A machine of Compute Engine has a tpu-env too, with the number 0 for a name.
        raise _refused(
            "this TPU machine was made by Compute Engine, not as a TPU VM: "
            "`gcloud compute instances stop` stops it"
        )
    if not (zone and project):
        raise _refused("the metadata server names no zone and project")
    host = env.get("GCE_METADATA_HOST") or metadata.NAME
    try:
        address = metadata.get(host, "instance/network-interfaces/0/ip", metadata.PATIENT)
    except (OSError, ValueError):
        address = None
    if not address:
        raise _refused("the metadata server does not say this machine's address")
    found = TpuVm(name, zone, project, given["ACCELERATOR_TYPE"], address)
    if machine.spot or given.get("PREEMPTIBLE") == "true":
        raise _refused(_spot(found))
    return found


def _refused(why: str) -> SetupError:
    return SetupError(f"--stop-when-done stops nothing here: {why}")


def _pod(hosts: int) -> str:
    return (
        f"this is one of {hosts} hosts of a TPU slice, and Google Cloud can only delete those, "
        "disks and all, not stop them. Send results away (`%tpu_data DIR --upload gs://…`), then "
        "`gcloud compute tpus tpu-vm delete` from elsewhere"
    )


def _spot(vm: TpuVm) -> str:
    return (
        "this is a spot VM, which cannot be started again once it is stopped: results on its disk "
        "would be lost. Send them away (`%tpu_data DIR --upload gs://…`), then "
        f"`gcloud compute tpus tpu-vm delete {vm.name} --zone={vm.zone} --project={vm.project}`"
    )


def gcloud(words: list[str]) -> str:
    """Run gcloud; what it prints. Raises SetupError with its last words if it fails."""
    command = shutil.which("gcloud")
    if command is None:
        raise _refused("gcloud is not installed, or not on PATH")
    try:
        done = subprocess.run(
            [command, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env={**os.environ, "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"},
        )
    except subprocess.TimeoutExpired:
        raise _refused(f"`gcloud {' '.join(words)}` has not ended in {PATIENCE:g} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split())[-600:] or f"exit code {done.returncode}"
        raise _refused(
            f"`gcloud {' '.join(words)}` fails: {said}. The machine's service account needs the "
            "role TPU Admin, and the machine the scope cloud-platform"
        )
    return done.stdout
