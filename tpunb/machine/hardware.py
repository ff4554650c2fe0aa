"""Finds problems with a TPU that is missing, cannot be opened, or is in use, and with disks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tpunb.machine import tpu
from tpunb.machine.machine import Machine
from tpunb.machine.problem import SetupProblem
from tpunb.machine.tpu_users import TpuUser
from tpunb.utils.text import memory_size

LITTLE_DISK = 2 * 2**30
"""Bytes. With less free, a few checkpoints fill the disk."""
LITTLE_SHM = 256 * 2**20
"""Bytes. With less, DataLoader workers die with a bus error: batches go through /dev/shm."""


def hardware_problems(
    machine: Machine, holders: Iterable[TpuUser], root: Path, cores: int
) -> Iterator[SetupProblem]:
    """Yield all problems with the device. `holders`: of the TPU. `cores`: ranks of a run."""
    if not machine.chips:
        yield from _no_tpu(machine)
        return
    if (why := machine.why_not_torchtpu()) is not None:
        fix = "use the backend xla, with torch 2.9 and torch_xla 2.9"
        yield SetupProblem("torchtpu-generation", f"{why}.", fix)
        return
    if machine.device == "TPU" or machine.backend == "torchtpu":
        yield from _files(machine, root)
    else:
        yield _not_used(machine)
    if machine.device == "TPU":
        yield from _held(holders)
        if (why := machine.check_cores(cores)) is not None:
            fix = f"`%tpu_setup --cores {min(machine.rank_counts)}`"
            yield SetupProblem("cores", f"{why}.", fix)


def _no_tpu(machine: Machine) -> Iterator[SetupProblem]:
    menu = {
        "colab": "for a TPU: Runtime > Change runtime type > v5e-1 TPU or v6e-1 TPU",
        "kaggle": "for a TPU: Settings > Accelerator > TPU v5e-8 (the session restarts)",
    }.get(machine.platform)
    if machine.device == "TPU":
        yield SetupProblem(
            "no-tpu",
            "PJRT_DEVICE is TPU, but there is no TPU on this machine's PCI bus.",
            menu or "unset PJRT_DEVICE: runs are then rehearsals on the CPU",
        )
    elif machine.device == "CPU" and menu is not None:
        yield SetupProblem(
            "no-tpu-runtime",
            f"{machine.kind}: this machine has no TPU, so runs are rehearsals on the CPU.",
            menu,
            must=False,
        )


def _not_used(machine: Machine) -> SetupProblem:
    if machine.backend == "xla":
        why = "PJRT_DEVICE=CPU keeps runs off them"
        fix = "unset PJRT_DEVICE (`del os.environ['PJRT_DEVICE']`) to train on the TPU"
    else:
        why = "the backend torch does not use them"
        fix = "use the backend torchtpu or xla to train on the TPU"
    message = f"this machine has {machine.chips} TPU chips, but {why}."
    return SetupProblem("tpu-not-used", message, fix, must=False)


def _files(machine: Machine, root: Path) -> Iterator[SetupProblem]:
    """Check the chips' device files, which a container may lack."""
    files = tpu.device_files(root)
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if not files:
        yield SetupProblem(
            "no-device-files",
            f"{machine.chips} TPU chips are on the PCI bus, but their device files (/dev/accel* "
            "or /dev/vfio/*) are missing: this container was started without them.",
            "start the container with `--privileged --net=host` (GKE: request `google.com/tpu` "
            "in the pod's resources)",
        )
    elif machine.device != "TPU":
        yield SetupProblem(
            "torchtpu-device-files",
            "torch_tpu opens a chip through /dev/vfio/N, where N is its IOMMU group, and finds "
            f"none of this machine's {machine.chips} TPU chips there: runs are rehearsals on the "
            "CPU.",
            "start a container with `--privileged --net=host`; on a VM whose image has "
            "/dev/accel* instead, choose an image with /dev/vfio, or use the backend xla",
        )
    elif closed:
        yield SetupProblem(
            "device-files-closed",
            f"this user cannot open {len(closed)} of the TPU's {len(files)} device files: "
            f"{closed[0]}{', …' if len(closed) > 1 else ''}.",
            f"`sudo chmod a+rw {' '.join(map(str, closed))}`, or work as a user who can open them",
        )


def _held(holders: Iterable[TpuUser]) -> Iterator[SetupProblem]:
    living: dict[str, SetupProblem] = {}
    for holder in holders:
        if not holder.living:
            yield SetupProblem("tpu-held", f"the TPU is held by {holder.describe()}.", holder.fix())
            continue
        message = f"run {Path(holder.name).name} is using the TPU; the next run waits for it."
        living[holder.name] = SetupProblem("tpu-in-use", message, holder.fix(), must=False)
    yield from living.values()


# --- Disk and shared memory ---


@dataclass(frozen=True)
class Resources:
    """Resources that a run can exhaust, in bytes."""

    runs: str
    """Folder of the run folders."""
    disk: int
    """Free bytes on the disk of the run folders."""
    shm: int | None
    """Size of /dev/shm; None if the machine has no /dev/shm."""


def measure_resources(root: Path, runs: Path) -> Resources:
    """Measure the disk of `runs`, or of its nearest parent that exists, and /dev/shm."""
    shm, folder = root / "dev/shm", runs
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    shared = shutil.disk_usage(shm).total if shm.is_dir() else None
    return Resources(str(runs), shutil.disk_usage(folder).free, shared)


def resource_problems(room: Resources) -> Iterator[SetupProblem]:
    """Yield a problem for each resource that is running out."""
    if room.disk < LITTLE_DISK:
        yield SetupProblem(
            "disk",
            f"only {memory_size(room.disk)} is free on the disk of the runs ({room.runs}).",
            "remove old runs with `tpunb clean`, or keep runs on another disk with "
            "`%tpu_setup --runs DIR`",
            must=room.disk < LITTLE_DISK / 20,
        )
    if room.shm is not None and room.shm < LITTLE_SHM:
        yield SetupProblem(
            "shm",
            f"/dev/shm has only {memory_size(room.shm)}: DataLoader workers send their batches "
            "through it, and die with a bus error when it is full.",
            "start the container with `--shm-size=8g` (Kubernetes: mount an emptyDir with medium "
            "Memory at /dev/shm), or use num_workers=0",
            must=False,
        )
