"""Recognises the platform that this process runs on by its variables, files and metadata server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.machine.metadata import Metadata
from tpunb.machine.tpu import device_files

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
    """More precise description for people: 'Kaggle, batch run', 'Colab Enterprise'."""
    signs: tuple[str, ...]
    """All signs found, also of other platforms: 'colab: COLAB_GPU is set'."""


def find_platform(env: Mapping[str, str], root: Path, metadata: Metadata, chips: int) -> Platform:
    """Recognise the platform by its signs. `chips`: TPU chips on the PCI bus."""
    signs: list[str] = []
    name = ""
    for platform, variables in _VARIABLES.items():
        seen = [f"{variable} is set" for variable in variables if variable in env]
        weight = _ENOUGH * len(seen)
        folders = [folder for folder in _FOLDERS[platform] if (root / folder).is_dir()]
        seen += [f"/{folder} exists" for folder in folders]
        weight += len(folders)
        if weight >= _ENOUGH and not name:
            name = platform
        signs += [f"{platform}: {sign}" for sign in seen]
    vm_signs = list(_vm_signs(env, root, metadata, chips))
    signs += [f"gcp-tpu-vm: {sign}" for sign in vm_signs]
    if not name and (chips or "accelerator-type" in metadata.values) and vm_signs:
        name = "gcp-tpu-vm"
    name = name or "local"
    return Platform(name, _kind(name, env, root, metadata, chips), tuple(signs))


def _vm_signs(env: Mapping[str, str], root: Path, metadata: Metadata, chips: int) -> Iterator[str]:
    """Yield the signs of a Google Cloud VM with a TPU, or of a container on one."""
    if chips:
        yield f"{chips} TPU chips on the PCI bus"
    if files := device_files(root):
        yield f"/{files[0].relative_to(root)} exists"
    for key in ("accelerator-type", "tpu-env"):
        if key in metadata.values:
            yield f"the metadata server has {key}"
    for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_NAME"):
        if name in env:
            yield f"{name} is set"


def _kind(platform: str, env: Mapping[str, str], root: Path, metadata: Metadata, chips: int) -> str:
    gpu = (root / "dev/nvidia0").exists()
    runtime = "TPU runtime" if chips else "GPU runtime" if gpu else "CPU runtime"
    if platform == "kaggle":
        how = env.get("KAGGLE_KERNEL_RUN_TYPE", "").lower()
        if env.get("KAGGLE_IS_COMPETITION_RERUN"):
            how = "competition rerun"
        session = {"interactive": "interactive session", "batch": "batch run"}.get(how, how)
        return ", ".join(filter(None, ["Kaggle", session, runtime]))
    if platform == "colab":
        enterprise = "COLAB_ENTERPRISE" in env or env.get("VERTEX_PRODUCT") == "COLAB_ENTERPRISE"
        return f"Colab{' Enterprise' if enterprise else ''}, {runtime}"
    if platform == "vertex":
        return "Vertex AI, " + ("training job" if "VERTEX_PRODUCT" not in env else "workbench")
    if platform == "gke":
        cluster = "cluster-name" in metadata.values or "TPU_WORKER_HOSTNAMES" in env
        return "GKE, a container" if cluster else "Kubernetes, a container"
    contained = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    if platform == "gcp-tpu-vm":
        return "Google Cloud TPU VM" + (", in a container" if contained else "")
    if metadata.state == "answers":
        return "Google Cloud VM without a TPU"
    return "a container" if contained else "this machine"
