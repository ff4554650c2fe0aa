"""What platforms look like from within: variables, folders, chips, metadata.

The variables are those of the sources that are named; where a platform's own are not published,
only those are here that are certain, which is what makes it hard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.machine import FakeMachine
from tests.fakes.metadata import Behaviour


@dataclass(frozen=True)
class Dump:
    """A platform, and what must be found there."""

    platform: str
    kind: str
    generation: str = ""
    chips: int = 0
    accelerator_type: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    googles: bool = False
    """Its firmware says that it is one of Google's machines."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What its metadata server has."""
    behaviour: Behaviour | None = None
    """How that server is; None: there is none."""
    workers: int = 1
    worker: int = 0
    spot: bool | None = None


def build(dump: Dump, root: Path) -> FakeMachine:
    """The machine. Its metadata server is `fakes.Server(dump.metadata, dump.behaviour)`."""
    machine = FakeMachine(root, dump.env)
    if dump.chips:
        machine.chips(dump.generation, dump.chips)
    if dump.googles:
        machine.googles()
    for name in dump.folders:
        machine.folder(name)
    for name in dump.files:
        machine.file(name)
    return machine


def _vm(
    kind: str,
    generation: str,
    chips: int,
    bounds: str,
    *,
    hosts: int = 1,
    worker: int = 0,
    spot: bool = False,
    host_bounds: str = "1,1,1",
) -> Dump:
    """A TPU VM. `tpu-env`: that of a v4-256 in penghao-wu/cambrian (test_tpu.py)."""
    name = f"t1v-n-0a1b2c3d-w-{worker}"
    env = {
        "ACCELERATOR_TYPE": kind,
        "CHIPS_PER_HOST_BOUNDS": bounds,
        "HOST_BOUNDS": host_bounds,
        "NODE_ID": "my-tpu",
        "PREEMPTIBLE": str(spot).lower(),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": host_bounds,
        "TPU_RUNTIME_METRICS_PORTS": "8431",
        "TYPE": kind.partition("-")[0].upper(),
        "WORKER_ID": str(worker),
        "ZONE": "us-central1-a",
    }
    if generation in ("v2", "v3"):  # torch_xla has their bounds in a table of its own
        del env["TPU_PROCESS_BOUNDS"], env["TPU_CHIPS_PER_PROCESS_BOUNDS"]
    endpoints = ",".join(f"unused:{8470 + n}:10.128.0.{2 + n}" for n in range(hosts))
    return Dump(
        "gcp-tpu-vm",
        "Google Cloud TPU VM",
        generation,
        chips,
        kind,
        env={"HOSTNAME": name},
        googles=True,
        behaviour="answers",
        metadata={
            "accelerator-type": kind,
            "agent-worker-number": str(worker),
            "instance/machine-type": f"projects/123/machineTypes/tpu-{generation}",
            "instance/scheduling/preemptible": str(spot).upper(),
            "instance/zone": "projects/123/zones/us-central1-a",
            "tpu-env": "".join(f"{name}: '{value}'\n" for name, value in env.items()),
            "worker-network-endpoints": endpoints,
        },
        workers=hosts,
        worker=worker,
        spot=spot,
    )


# googlecolab/colabtools 3c07d77 and googlecolab/backend-info a724079. What else a TPU runtime
# sets is not published.
_COLAB = {
    "COLAB_BACKEND_VERSION": "next",
    "COLAB_RELEASE_TAG": "release-colab_20260819-060120_RC00",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}
# Kaggle/docker-python 78aaa43, tpu/ and patches/; kagglesdk 0.1.38.
_KAGGLE = {
    "KAGGLE_DATA_PROXY_PROJECT": "kaggle-161607",
    "KAGGLE_DATA_PROXY_TOKEN": "token",
    "KAGGLE_DATA_PROXY_URL": "https://dp.kaggle.net",
    "KAGGLE_KERNEL_INTEGRATIONS": "",
    "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
    "KAGGLE_URL_BASE": "https://www.kaggle.com",
    "KAGGLE_USER_SECRETS_TOKEN": "token",
}
_KAGGLE_TPU = _KAGGLE | {
    "ISTPUVM": "1",
    "PYTHONUSERBASE": "/root/.local",
    "TPU_PROCESS_ADDRESSES": "local",
}
_KAGGLE_FOLDERS = ("kaggle/input", "kaggle/working")
# The test of GKE's TPU device plugin, for a v5e 2x4.
_GKE = {
    "CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "HOST_BOUNDS": "1,1,1",
    "KUBERNETES_SERVICE_HOST": "34.118.224.1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_RUNTIME_METRICS_PORTS": "8431,8432,8433,8434,8435,8436,8437,8438",
    "TPU_SKIP_MDS_QUERY": "true",
    "TPU_TOPOLOGY": "2x4",
    "TPU_TOPOLOGY_ALT": "false",
    "TPU_TOPOLOGY_WRAP": "false,false,false",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}

DUMPS: dict[str, Dump] = {
    "colab-cpu": Dump("colab", "Colab, CPU runtime", env=_COLAB, folders=("content",)),
    "colab-gpu": Dump(
        "colab",
        "Colab, GPU runtime",
        env=_COLAB | {"COLAB_GPU": "1"},
        folders=("content",),
        files=("dev/nvidia0",),
    ),
    # pytorch/xla#6568: the server is there, and has no tpu-env.
    "colab-tpu": Dump(
        "colab",
        "Colab, TPU runtime",
        "v5e",
        1,
        "v5litepod-1",
        env=_COLAB,
        folders=("content",),
        googles=True,
        behaviour="answers",
    ),
    "colab-enterprise": Dump(
        "colab",
        "Colab Enterprise, CPU runtime",
        env={"COLAB_ENTERPRISE": "1", "VERTEX_PRODUCT": "COLAB_ENTERPRISE"},
        folders=("content",),
        googles=True,
        behaviour="answers",
        metadata={"instance/scheduling/preemptible": "FALSE"},
        spot=False,
    ),
    "kaggle-cpu": Dump(
        "kaggle",
        "Kaggle, CPU runtime",
        env=_KAGGLE,
        folders=_KAGGLE_FOLDERS,
    ),
    # Kaggle's images for CPU and GPU are built on Colab's, and keep some of its variables.
    "kaggle-gpu": Dump(
        "kaggle",
        "Kaggle, GPU runtime",
        env=_KAGGLE | {"COLAB_RELEASE_TAG": _COLAB["COLAB_RELEASE_TAG"]},
        folders=(*_KAGGLE_FOLDERS, "content"),
        files=("dev/nvidia0",),
    ),
    "kaggle-tpu": Dump(
        "kaggle",
        "Kaggle, TPU runtime",
        "v5e",
        8,
        "v5litepod-8",
        env=_KAGGLE_TPU,
        folders=_KAGGLE_FOLDERS,
        behaviour="refuses",
    ),
    "kaggle-tpu-batch": Dump(
        "kaggle",
        "Kaggle, TPU runtime",
        "v5e",
        8,
        "v5litepod-8",
        env=_KAGGLE_TPU
        | {
            "CLOUD_TPU_TASK_ID": "0",
            "KAGGLE_KERNEL_RUN_TYPE": "Batch",
            "TPU_ACCELERATOR_TYPE": "v5litepod-8",
            "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
            "TPU_HOST_BOUNDS": "1,1,1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
        },
        folders=_KAGGLE_FOLDERS,
        behaviour="refuses",
    ),
    "v2-8": _vm("v2-8", "v2", 4, "2,2,1"),
    "v3-8": _vm("v3-8", "v3", 4, "2,2,1", spot=True),
    "v4-8": _vm("v4-8", "v4", 4, "2,2,1"),
    "v5e-1": _vm("v5litepod-1", "v5e", 1, "1,1,1"),
    "v5e-8": _vm("v5litepod-8", "v5e", 8, "2,4,1", spot=True),
    "v5e-16": _vm("v5litepod-16", "v5e", 4, "2,2,1", hosts=4, worker=1, host_bounds="2,2,1"),
    "v5p-8": _vm("v5p-8", "v5p", 4, "2,2,1"),
    "v6e-8": _vm("v6e-8", "v6e", 8, "2,4,1"),
    "gke": Dump(
        "gke",
        "GKE, a container",
        "v5e",
        8,
        "v5litepod-8",
        env=_GKE,
        folders=("var/run/secrets/kubernetes.io",),
        googles=True,
        behaviour="answers",
        metadata={"cluster-name": "my-cluster", "instance/scheduling/preemptible": "TRUE"},
        spot=True,
    ),
    "vertex": Dump(
        "vertex",
        "Vertex AI",
        "v5e",
        4,
        "v5litepod-4",
        env={"AIP_MODEL_DIR": "gs://bucket/model", "CLOUD_ML_PROJECT_ID": "123"},
        googles=True,
        behaviour="answers",
    ),
    # docker without --net=host on a TPU VM: the name of the server leads nowhere.
    "container": Dump(
        "gcp-tpu-vm",
        "Google Cloud TPU VM, in a container",
        "v4",
        4,
        "v4-8",
        files=(".dockerenv",),
        behaviour="refuses",
    ),
    "gce": Dump(
        "local",
        "Google Cloud VM without a TPU",
        googles=True,
        behaviour="answers",
        metadata={"instance/scheduling/preemptible": "FALSE"},
        spot=False,
    ),
    "laptop": Dump("local", "this machine"),
}
