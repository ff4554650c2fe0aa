"""Writes the Kubernetes objects that start a run on a cluster with TPUs, using JobSet.

    ConfigMap   the script and its spec, at most 1 MiB
    Secret      the run's key, by which its hosts recognise each other, and the ranks' variables
    JobSet      one Job with a pod for each host of the slice; Kueue admits all of them or none

Each pod runs `tpunb node`, which gets its number from JOB_COMPLETION_INDEX (or TPU_WORKER_ID, the
same number, if GKE sets it); JobSet gives host 0 a name. The objects follow JobSet's example for
v6e (jobset.x-k8s.io/v1alpha2, v0.12) and the output of xpk 1.16.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tpunb.places import archive
from tpunb.places.config import JobSetSettings, PlaceConfig
from tpunb.places.errors import PlaceError
from tpunb.places.kubectl import CONTAINER, INSTANCE, Kubectl
from tpunb.places.place import HostsRun, place_of
from tpunb.places.target import Estimate, PlaceTarget
from tpunb.runs import stream
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device, RunSpec
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import size

MOST_FILES = 1 << 20
"""Bytes of all values of a ConfigMap or a Secret (Kubernetes' MaxSecretSize)."""
JOB = "node"
"""Name of the Job in the JobSet: its pods are <set>-node-0-<node rank>."""
_LONGEST = 63
"""Most characters of a pod's name, which is also its host name (RFC 1123)."""
_FILES = "/etc/tpunb/run"
_KEY = "/etc/tpunb/key"
_ENDING = 15.0
"""Seconds after the grace period for ending the ranks and writing the result."""


@dataclass(frozen=True)
class JobSetRun(HostsRun):
    """Where a run in a cluster was sent."""

    name: str = field(kw_only=True)
    """Name of the run's objects."""
    restart: int = field(default=0, kw_only=True)
    """Number of JobSet's restarts when the pods were last followed."""

    @property
    def leftover(self) -> str:
        words = Kubectl(self.place.settings_as(JobSetSettings)).command(
            "delete", "jobset,configmap,secret", "-l", f"{INSTANCE}={self.name}"
        )
        return (
            f"JobSet {self.name} may still exist, and start or cost money: delete it with "
            f"`{shlex.join(words)}`"
        )


@dataclass(frozen=True)
class JobSetTarget(PlaceTarget):
    """A slice in a cluster, entirely described by `places.toml`."""

    place: PlaceConfig
    name: str = ""
    """Name of the run's JobSet, once it has one."""
    asked: Estimate = field(default_factory=Estimate)
    """Price and queue, queried from the cluster."""

    @property
    def settings(self) -> JobSetSettings:
        return self.place.settings_as(JobSetSettings)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{JOB}-{rank}" for rank in range(self.settings.slice.hosts))

    @property
    def leader(self) -> str:
        """The name of host 0 in the cluster."""
        return f"{self.name}-{JOB}-0-0.{self.name}"

    def placed(self, run_id: str, *, detached: bool) -> JobSetRun:
        title = re.sub(r"^\d+-\d+-", "", run_id)
        name = f"{name_run(title, self.place, more=5)}-{secrets.token_hex(2)}"
        folders = (f"runs/{run_id}",) * len(self.hosts)
        return JobSetRun(
            *(self.place, self.hosts, self.hosts, folders, "python3"),
            *(self.settings.port, "", "."),
            name=name,
            detached=detached,
        )

    @property
    def estimate(self) -> Estimate:
        return self.asked

    @property
    def device(self) -> Device:
        return "TPU"

    @property
    def local_cores(self) -> int:
        return self.settings.slice.chips

    @property
    def facts(self) -> Mapping[str, Any]:
        own = self.settings.slice
        return {"chips": own.chips, "accelerator_type": own.accelerator_type}

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return the image's working directory: only the script is sent."""
        return ".", ()

    def resume(self, run: RunDir) -> str:
        place = place_of(run)
        if place is not None and "://" in (shared := place.checkpoints(run.id)):
            return shared
        raise TpunbError(
            f"--resume: the pods of {self.place.name} cannot find the checkpoints of run "
            f"{run.id}: give their URL"
        )

    def without_checkpoints(self) -> list[str]:
        return [
            "checkpoints of tpunb.save are lost with the pods, and a restart begins from the "
            f"start: name a URL (gs://…) as `checkpoints` of [places.{self.place.name}]"
        ]


def name_run(name: str, place: PlaceConfig, more: int = 0) -> str:
    """Make a name for the JobSet of a new run; its pods' names begin with it.

    `more`: number of characters that the caller appends.
    """
    last = f"-{JOB}-0-{place.settings_as(JobSetSettings).slice.hosts - 1}-12345"
    now = time.strftime("-%Y%m%d-%H%M%S")
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    if not short[0].isalpha():  # it is also a Service's name, which begins with a letter
        short = f"run-{short}"
    return short[: _LONGEST - len(last) - len(now) - more].rstrip("-") + now


def write_manifest(
    target: JobSetTarget,
    spec: RunSpec,
    script: str,
    variables: Mapping[str, str],
    key: str,
    *,
    more: RunDir | None = None,
    followed: Sequence[str] = (),
) -> str:
    """Write the objects of a run in YAML, for `kubectl create`.

    `variables`: for the ranks; they may be secrets. `key`: the run's key, in hexadecimal digits.
    `more`: the run folder, to send its other files as well. `followed`: further words for
    `tpunb node`, if the run is followed. Raises PlaceError if the objects are too large.
    """
    files = {"script.py": script, "spec.json": json.dumps(spec.to_json())}
    secret = {"key": key, "variables.json": json.dumps(dict(variables))}
    binary = {} if more is None else _pack_more(more)
    for kind, values in (("ConfigMap", {**files, **binary}), ("Secret", secret)):
        total = sum(len(value.encode()) for value in values.values())
        if total > MOST_FILES:
            raise PlaceError(
                f"{' and '.join(values)} take {size(total)}, but a {kind} of Kubernetes holds at "
                f"most {size(MOST_FILES)}: put large data into the image or a bucket, not into "
                "cells or variables",
                target.place.file,
                f"places.{target.place.name}",
            )
    objects = [
        _object(
            target,
            "v1",
            "ConfigMap",
            immutable=True,
            data=files,
            **({"binaryData": binary} if binary else {}),
        ),
        _object(target, "v1", "Secret", immutable=True, type="Opaque", stringData=secret),
        _jobset(target, spec, followed),
    ]
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def _object(target: JobSetTarget, version: str, kind: str, **values: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": target.name, "labels": {INSTANCE: target.name}}
    if target.settings.namespace:
        metadata["namespace"] = target.settings.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **values}


def _pack_more(run: RunDir) -> dict[str, str]:
    """Pack the files that a run reads in addition to its script; {} if there are none."""
    if not (files := archive.run_files(run, stream.INPUTS)):
        return {}
    return {stream.ARCHIVE: base64.b64encode(archive.pack(files, "gz")).decode()}


def _jobset(target: JobSetTarget, spec: RunSpec, followed: Sequence[str]) -> dict[str, Any]:
    settings, own = target.settings, target.settings.slice
    job = {
        "parallelism": own.hosts,
        "completions": own.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # JobSet restarts all pods, never a pod alone
        "template": {
            "metadata": {"labels": {INSTANCE: target.name}},
            "spec": _pod(target, spec, followed),
        },
    }
    made = _object(
        target,
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        spec={
            "failurePolicy": {"maxRestarts": settings.restarts},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    )
    if settings.queue:
        made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
    if own.hosts > 1:  # one slice is one node pool
        made["metadata"]["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return made


def _pod(target: JobSetTarget, spec: RunSpec, followed: Sequence[str]) -> dict[str, Any]:
    settings, own = target.settings, target.settings.slice
    node = [
        "--run", f"runs/{spec.id}", "--files", _FILES, "--key-file", f"{_KEY}/key",
        "--nnodes", str(own.hosts), "--rendezvous", f"{target.leader}:{settings.port}",
        "--address", "$(POD_IP)", *followed,
    ]  # fmt: skip
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": ["tpunb", "node"],
        "args": node,
        "env": [
            # The cluster may resolve the pod's own name only after the pod has started.
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "securityContext": {"privileged": True},
        "resources": {
            "requests": {"google.com/tpu": own.chips},
            "limits": {"google.com/tpu": own.chips},
        },
        "volumeMounts": [
            {"name": "run", "mountPath": _FILES, "readOnly": True},
            {"name": "key", "mountPath": _KEY, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    variables = [{"key": "variables.json", "path": "variables.json"}]
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(spec.grace + _ENDING),
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": own.accelerator.label,
            "cloud.google.com/gke-tpu-topology": own.topology,
        },
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {
                "name": "run",
                "projected": {
                    "sources": [
                        {"configMap": {"name": target.name}},
                        {"secret": {"name": target.name, "items": variables}},
                    ]
                },
            },
            {
                "name": "key",
                "secret": {
                    "secretName": target.name,
                    "items": [{"key": "key", "path": "key"}],
                    "defaultMode": 0o400,
                },
            },
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    return pod


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that the script is readable; no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
