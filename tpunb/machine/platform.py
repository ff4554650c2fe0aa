"""Recognises the platform that this process runs on by its variables, files and metadata server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.machine.metadata import Metadata

# A variable that only one platform sets is enough by itself. Kaggle comes first: its images
# are built on Colab's. Colab and Kaggle come before Kubernetes, which they may run on.
# Kaggle/docker-python 78aaa43 (patches/) and kagglesdk 0.1.38; googlecolab/colabtools 3c07d77;
# Vertex AI's environment variables for custom training; GKE's TPU device plugin and JobSet.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "kaggle": (
        "KAGGLE_KERNEL_RUN_TYPE",
        "KAGGLE_USER_SECRETS_TOKEN",
        "KAGGLE_DATA_PROXY_URL",
        "KAGGLE_KERNEL_INTEGRATIONS",
    ),
    "colab": ("COLAB_RELEASE_TAG", "COLAB_ENTERPRISE", "COLAB_BACKEND_VERSION", "COLAB_GPU"),
    "vertex": ("CLOUD_ML_PROJECT_ID", "CLOUD_ML_JOB", "AIP_MODEL_DIR", "VERTEX_PRODUCT"),
    "gke": ("KUBERNETES_SERVICE_HOST", "JOBSET_NAME", "JOB_COMPLETION_INDEX"),
}
# Folders that may exist on other machines too: two of them count as much as a variable.
_FOLDERS: dict[str, tuple[str, ...]] = {
    "kaggle": ("kaggle/input", "kaggle/working"),
    "colab": ("content", "opt/google/drive", "datalab"),
    "vertex": (),
    "gke": ("var/run/secrets/kubernetes.io", "run/secrets/kubernetes.io"),
}
_ENOUGH = 2


@dataclass(frozen=True)
class Platform:
    name: str
    """'colab', 'kaggle', 'vertex', 'gke', 'gcp-tpu-vm' or 'local' (any other machine)."""
    kind: str
    """More precise description for people: 'Kaggle, TPU runtime', 'Colab Enterprise, …'."""


def find_platform(env: Mapping[str, str], root: Path, metadata: Metadata, chips: int) -> Platform:
    """Recognise the platform by its signs. `chips`: TPU chips on the PCI bus."""
    name = "gcp-tpu-vm" if chips or "accelerator-type" in metadata.values else "local"
    for platform, variables in _VARIABLES.items():
        weight = _ENOUGH * sum(variable in env for variable in variables)
        weight += sum((root / folder).is_dir() for folder in _FOLDERS[platform])
        if weight >= _ENOUGH:
            name = platform
            break
    return Platform(name, _kind(name, env, root, metadata, chips))


def _kind(platform: str, env: Mapping[str, str], root: Path, metadata: Metadata, chips: int) -> str:
    gpu = (root / "dev/nvidia0").exists()
    runtime = "TPU runtime" if chips else "GPU runtime" if gpu else "CPU runtime"
    if platform == "kaggle":
        return f"Kaggle, {runtime}"
    if platform == "colab":
        enterprise = "COLAB_ENTERPRISE" in env or env.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE"
        return f"Colab{' Enterprise' if enterprise else ''}, {runtime}"
    if platform == "vertex":
        return "Vertex AI"
    if platform == "gke":
        cluster = "cluster-name" in metadata.values or "TPU_WORKER_HOSTNAMES" in env
        return "GKE, a container" if cluster else "Kubernetes, a container"
    contained = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    if platform == "gcp-tpu-vm":
        return "Google Cloud TPU VM" + (", in a container" if contained else "")
    if metadata.answers:
        return "Google Cloud VM without a TPU"
    return "a container" if contained else "this machine"
