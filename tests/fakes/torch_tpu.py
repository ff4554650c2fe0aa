"""A torch_tpu (and a torch) of which only `set_tpu_launch_env` is there, as 0.2.0 has it."""

from __future__ import annotations

from pathlib import Path

_TORCH_TPU = '''\
"""The TPU is that of the fake machine below TPUNB_ROOT."""
import itertools, os, sys, types
from pathlib import Path

print("libtpu not found.")
_TOPOLOGY = {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}
_ports = itertools.count(33943)


def _chips():
    root = Path(os.environ.get("TPUNB_ROOT", "/nowhere"))
    links = [chip / "iommu_group" for chip in root.glob("sys/bus/pci/devices/*")]
    groups = [link.readlink().name for link in links if link.is_symlink()]
    return sum((root / "dev/vfio" / group).exists() for group in groups)


def set_tpu_launch_env(*, nnodes=None, nproc_per_node=None):
    """Never changes a variable that is set."""
    env = os.environ
    env.setdefault("TORCH_TPU_XPROF_SESSION_ID", str(os.getpid()))
    hosts = [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if nnodes is not None and hosts and nnodes != len(hosts):
        raise ValueError("set_tpu_launch_env(): expected nnodes to match the number of hosts")
    count = nproc_per_node or _chips()
    if (nnodes or 1) > 1 or len(hosts) > 1 or "JOB_COMPLETION_INDEX" in env:
        if not hosts:
            raise ValueError("set_tpu_launch_env(): expected TPU_WORKER_HOSTNAMES, got it as unset")
        places = [f"{host}:{8070 + n}" for host in hosts for n in range(count)]
        env.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(places))
        env.setdefault("NNODES", str(nnodes or len(hosts)))
        if "NODE_RANK" not in env and "JOB_COMPLETION_INDEX" not in env:
            raise ValueError("set_tpu_launch_env(): expected JOB_COMPLETION_INDEX, got neither")
        env.setdefault("NODE_RANK", env.get("JOB_COMPLETION_INDEX", ""))
        env.setdefault("MASTER_ADDR", hosts[0])
        env.setdefault("MASTER_PORT", "29500")
        env.setdefault("TORCH_TPU_TOPOLOGY", _TOPOLOGY[_chips()])
        return
    if _chips() and count not in _TOPOLOGY:
        raise RuntimeError(f"No TPU topology found for count: {count}")
    places = [f"localhost:{next(_ports)}" for _ in range(count)]
    env.setdefault("TORCH_TPU_SLICEBUILDER_ADDRESSES", ",".join(places))
    if not _chips():
        raise ValueError("set_tpu_launch_env(): expected TPU devices, got none")
    env.setdefault("TORCH_TPU_TOPOLOGY", _TOPOLOGY[count])


tpu, distributed = types.ModuleType("torch.tpu"), types.ModuleType("torch.tpu.distributed")
distributed.set_tpu_launch_env = set_tpu_launch_env
tpu.distributed = distributed
sys.modules["torch"].tpu = tpu
sys.modules |= {"torch.tpu": tpu, "torch.tpu.distributed": distributed}
'''


def install(folder: Path, code: str = _TORCH_TPU) -> str:
    """Make the packages in `folder`, and return it for PYTHONPATH. `code`: another torch_tpu."""
    for name, text in (("torch", ""), ("torch_tpu", code)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(text)
    return str(folder)


_LOADS_ITSELF = '''\
"""What torch_tpu 0.2.0 does in its `_loader.py` on a machine without a TPU."""
import os, sys, types

_NAME = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_before = os.environ.get(_NAME, "1")
os.environ[_NAME] = "0"
import torch

torch.tpu = sys.modules["torch.tpu"] = types.ModuleType("torch.tpu")
_kernels = torch.library.Library("aten", "IMPL", "PrivateUse1")
_kernels.impl("sin", torch.cos)


def load():
    os.environ[_NAME] = _before


if _before == "1":
    load()
'''


def install_beside_torch(folder: Path) -> str:
    """Make a torch_tpu in `folder` that torch loads when it is imported, and return the folder."""
    for name, text in {
        "torch_tpu/__init__.py": "from torch_tpu import _loader\n",
        "torch_tpu/_loader.py": _LOADS_ITSELF,
        "torch_tpu-0.2.0.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n"
        ),
        "libtpu-0.0.52.dist-info/METADATA": (
            "Metadata-Version: 2.1\nName: libtpu\nVersion: 0.0.52\n"
        ),
        "torch_tpu-0.2.0.dist-info/entry_points.txt": (
            "[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n"
        ),
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)
