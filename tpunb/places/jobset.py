"""Writes the Kubernetes objects that run a notebook's exported script on a cluster's TPUs.

    ConfigMap   the script, at most 1 MiB
    Secret      the script's variables: those of --env may be secrets
    JobSet      one Job with a pod for each host of the slice; Kueue admits all of them or none

Each pod runs torchrun with a static rendezvous at pod 0, to which JobSet gives a name; its node
rank is the pod's completion index. The objects follow JobSet's example for v6e
(jobset.x-k8s.io/v1alpha2, v0.12) and the output of xpk 1.16.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import yaml

from tpunb.machine import tpu
from tpunb.places.config import PORT, JobSetSettings, PlaceConfig
from tpunb.runs.spec import BackendName
from tpunb.utils import env_vars

INSTANCE = "app.kubernetes.io/instance"
"""The label of all objects of a run, with the JobSet's name as its value."""
JOB = "node"
"""Name of the Job in the JobSet: its pods are <set>-node-0-<node rank>."""
_LABELS = {"v5e": "tpu-v5-lite-podslice", "v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}
"""Values of the nodes' label cloud.google.com/gke-tpu-accelerator; tpu7x is its own."""
_SHORT = 24
"""Most characters of a notebook's name in the name of a pod, which has at most 63 (RFC 1123)."""
_FILES = "/etc/tpunb"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# torchrun's ranks inherit torch_tpu's variables of a launch, which differ from run to run.
_FOR_TORCHTPU = """\
import os, sys
from tpunb.backends.torchtpu.launch_variables import launch_environment
made = launch_environment(os.environ, {ranks}, int(os.environ["NODE_RANK"]), {hosts})
os.environ.update(made)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def name_run(name: str) -> str:
    """Make a name for the JobSet of a new run; its pods' names begin with it."""
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not short[:1].isalpha():  # it is also a Service's name, which begins with a letter
        short = f"run-{short}"
    return short[:_SHORT].rstrip("-") + time.strftime("-%Y%m%d-%H%M%S")


def ranks_of_host(settings: JobSetSettings, backend: BackendName) -> int:
    """Ranks of each pod: one for each device of its chips."""
    devices = {"tpu7x": tpu.TORCH_TPU_DEVICES["v7x"]} if backend == "torchtpu" else {}
    return settings.chips * devices.get(settings.accelerator, 1)


def write_manifest(
    place: PlaceConfig,
    name: str,
    script: str,
    variables: Mapping[str, str],
    *,
    backend: BackendName = "xla",
    spmd: bool = False,
    grace: float = 15.0,
    restarts: int = 0,
    timeout: float | None = None,
) -> str:
    """Write the objects of a run in YAML, for `kubectl apply`.

    `variables`: for the script; they may be secrets. `spmd`: one process drives all chips of a
    host. `grace`: seconds in which the script may save after a stop. `restarts`: how often JobSet
    starts all pods again after one has failed. `timeout`: seconds after which they are stopped.
    """
    settings = place.settings_as(JobSetSettings)
    if shared := place.checkpoints(name):
        variables = {env_vars.CHECKPOINTS: shared, **variables}
    pod = _pod(settings, name, 1 if spmd else ranks_of_host(settings, backend), backend)
    pod["terminationGracePeriodSeconds"] = round(grace)
    job = {
        "parallelism": settings.hosts,
        "completions": settings.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # JobSet restarts all pods, never a pod alone
        **({} if timeout is None else {"activeDeadlineSeconds": max(1, round(timeout))}),
        "template": {"metadata": {"labels": {INSTANCE: name}}, "spec": pod},
    }
    spec = {
        "failurePolicy": {"maxRestarts": restarts},
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
    }
    jobset = _object(name, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)
    if settings.queue:
        jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
    if settings.hosts > 1:  # one slice is one node pool
        jobset["metadata"]["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    objects = [
        _object(name, "v1", "ConfigMap", data={"script.py": script}),
        _object(name, "v1", "Secret", type="Opaque", stringData=dict(variables)),
        jobset,
    ]
    chosen = f"-l {INSTANCE}={name}"
    return (
        f"# kubectl apply -f FILE\n"
        f"# kubectl logs -f --prefix --max-log-requests={settings.hosts} {chosen}\n"
        f"# kubectl delete jobset,configmap,secret {chosen}\n"
    ) + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def _pod(settings: JobSetSettings, name: str, ranks: int, backend: BackendName) -> dict[str, Any]:
    """The specification of the pods."""
    chips = {"google.com/tpu": settings.chips}
    container = {
        "name": "tpunb",
        "image": settings.image,
        "command": _command(settings, name, ranks, backend),
        "env": [
            {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
            *({"name": k, "value": v} for k, v in _environment(settings, backend).items()),
        ],
        "envFrom": [{"secretRef": {"name": name}}],
        "securityContext": {"privileged": True},
        "resources": {"requests": chips, "limits": chips},
        "volumeMounts": [
            {"name": "script", "mountPath": _FILES, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    account = {"serviceAccountName": settings.service_account} if settings.service_account else {}
    return {
        **account,
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": _LABELS.get(
                settings.accelerator, settings.accelerator
            ),
            "cloud.google.com/gke-tpu-topology": settings.topology,
        },
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {"name": "script", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


def _command(settings: JobSetSettings, name: str, ranks: int, backend: BackendName) -> list[str]:
    """The command line of every pod; Kubernetes replaces $(NODE_RANK)."""
    hosts = [f"{name}-{JOB}-0-{rank}.{name}" for rank in range(settings.hosts)]
    command = [
        *("torchrun", f"--nnodes={len(hosts)}", "--node-rank=$(NODE_RANK)"),
        *(f"--nproc-per-node={ranks}", f"--master-addr={hosts[0]}", f"--master-port={PORT}"),
        *(f"--rdzv-id={name}", f"{_FILES}/script.py"),
    ]
    if backend != "torchtpu":
        return command
    known = hosts if len(hosts) > 1 else []
    return ["python3", "-c", _FOR_TORCHTPU.format(ranks=ranks, hosts=known), *command]


def _environment(settings: JobSetSettings, backend: BackendName) -> dict[str, str]:
    """What torch_xla reads and GKE does not set, or sets in a form that it does not know."""
    if backend != "xla":
        return {}
    kind = tpu.type_of_slice(settings.accelerator, settings.topology)
    # On several hosts GKE sets their names and numbers.
    one = tpu.topology_variables(kind, settings.chips) if settings.hosts == 1 else {}
    return {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": kind, **one}


def _object(name: str, version: str, kind: str, **values: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": {INSTANCE: name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **values}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that the script is readable."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
