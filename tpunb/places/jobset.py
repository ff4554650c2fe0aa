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
from tpunb.places.errors import PlaceError
from tpunb.runs.spec import BackendName
from tpunb.utils import env_vars
from tpunb.utils.text import size

INSTANCE = "app.kubernetes.io/instance"
"""The label of all objects of a run, with the JobSet's name as its value."""
MOST_FILES = 1 << 20
"""Bytes of all values of a ConfigMap or a Secret (Kubernetes' MaxSecretSize)."""
JOB = "node"
"""Name of the Job in the JobSet: its pods are <set>-node-0-<node rank>."""
_LONGEST = 63
"""Most characters of a pod's name, which is also its host name (RFC 1123)."""
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


def name_run(name: str, settings: JobSetSettings) -> str:
    """Make a name for the JobSet of a new run; its pods' names begin with it."""
    last = f"-{JOB}-0-{settings.slice.hosts - 1}-12345"
    now = time.strftime("-%Y%m%d-%H%M%S")
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    if not short[0].isalpha():  # it is also a Service's name, which begins with a letter
        short = f"run-{short}"
    return short[: _LONGEST - len(last) - len(now)].rstrip("-") + now


def ranks_of_host(settings: JobSetSettings, backend: BackendName) -> int:
    """Ranks of each pod: one for each device of its chips."""
    devices = {"tpu7x": tpu.TORCH_TPU_DEVICES["v7x"]} if backend == "torchtpu" else {}
    return settings.slice.chips * devices.get(settings.accelerator, 1)


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
    Raises PlaceError if the objects are too large.
    """
    settings = place.settings_as(JobSetSettings)
    if shared := place.checkpoints(name):
        variables = {env_vars.CHECKPOINTS: shared, **variables}
    for what, kind, text in (("The script", "ConfigMap", script), ("--env", "Secret", variables)):
        taken = len(str(text).encode())
        if taken > MOST_FILES:
            raise PlaceError(
                f"{what} takes {size(taken)}, but a {kind} of Kubernetes holds at most "
                f"{size(MOST_FILES)}: put large data into the image or a bucket",
                place.file,
                f"places.{place.name}",
            )
    ranks = 1 if spmd else ranks_of_host(settings, backend)
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
        "resources": {
            "requests": {"google.com/tpu": settings.slice.chips},
            "limits": {"google.com/tpu": settings.slice.chips},
        },
        "volumeMounts": [
            {"name": "script", "mountPath": _FILES, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    objects = [
        _object(settings, name, "v1", "ConfigMap", data={"script.py": script}),
        _object(settings, name, "v1", "Secret", type="Opaque", stringData=dict(variables)),
        _jobset(settings, name, container, round(grace), restarts, timeout),
    ]
    chosen = f"-l {INSTANCE}={name}" + (f" -n {settings.namespace}" * bool(settings.namespace))
    return (
        f"# kubectl apply -f FILE\n"
        f"# kubectl logs -f --prefix --max-log-requests={settings.slice.hosts} {chosen}\n"
        f"# kubectl delete jobset,configmap,secret {chosen}\n"
    ) + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def _command(settings: JobSetSettings, name: str, ranks: int, backend: BackendName) -> list[str]:
    """The command line of every pod; Kubernetes replaces $(NODE_RANK)."""
    hosts = [f"{name}-{JOB}-0-{rank}.{name}" for rank in range(settings.slice.hosts)]
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
    own = settings.slice
    # On several hosts GKE sets their names and numbers.
    one = tpu.topology_variables(own.accelerator_type, own.chips) if own.hosts == 1 else {}
    return {"PJRT_DEVICE": "TPU", "TPU_ACCELERATOR_TYPE": own.accelerator_type, **one}


def _object(
    settings: JobSetSettings, name: str, version: str, kind: str, **values: Any
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": {INSTANCE: name}}
    if settings.namespace:
        metadata["namespace"] = settings.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **values}


def _jobset(
    settings: JobSetSettings,
    name: str,
    container: Mapping[str, Any],
    grace: int,
    restarts: int,
    timeout: float | None,
) -> dict[str, Any]:
    own = settings.slice
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": own.accelerator.label,
            "cloud.google.com/gke-tpu-topology": own.topology,
        },
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        "containers": [container],
        "volumes": [
            {"name": "script", "configMap": {"name": name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if settings.service_account:
        pod["serviceAccountName"] = settings.service_account
    job = {
        "parallelism": own.hosts,
        "completions": own.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # JobSet restarts all pods, never a pod alone
        **({} if timeout is None else {"activeDeadlineSeconds": max(1, round(timeout))}),
        "template": {"metadata": {"labels": {INSTANCE: name}}, "spec": pod},
    }
    spec = {
        "failurePolicy": {"maxRestarts": restarts},
        "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
    }
    made = _object(settings, name, "jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)
    if settings.queue:
        made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
    if own.hosts > 1:  # one slice is one node pool
        made["metadata"]["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return made


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that the script is readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
