"""Free disk, shared memory and memory, and the session's remaining time, for `tpunb doctor`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.machine import environment
from tpunb.machine.machine import RANK_MEMORY, Machine
from tpunb.machine.problem import SetupProblem
from tpunb.utils import env_vars
from tpunb.utils.files import size_of
from tpunb.utils.text import memory_size

_GIB = 2**30
LITTLE_DISK = 2 * _GIB
"""Bytes. With less free, a few checkpoints fill the disk."""
LITTLE_SHM = 256 * 2**20
"""Bytes. With less, DataLoader workers die with a bus error: batches go through /dev/shm."""
DEVICE_RANK_MEMORY = 3 * _GIB
"""Bytes of host memory assumed for each rank on a TPU or GPU: torch, the device's library and its
buffers, a compilation. An estimate, not measured."""
# Hours of the longest session: Kaggle's client 2.2.5 waits 12 h, "the maximum notebook runtime".
_HOURS = {"kaggle": 12.0}


@dataclass(frozen=True)
class Resources:
    """Resources that a run can exhaust, in bytes and seconds."""

    runs: str
    """Folder of the run folders."""
    disk: int
    """Free bytes on the disk of the run folders."""
    shm: int | None
    """Size of /dev/shm; None if the machine has no /dev/shm."""
    memory: int
    """Free memory for new processes."""
    needed: int
    """Least memory that the ranks of a run need."""
    cache: str = ""
    """Folder of compiled programs; empty if they are not cached."""
    cached: int = 0
    """Bytes in `cache`."""
    left: float | None = None
    """Seconds until the platform ends the session at the latest; None if no limit is known."""


def measure_resources(
    machine: Machine, env: Mapping[str, str], root: Path, runs: Path, cores: int, since: float
) -> Resources:
    """Measure the resources. `since`: the session's start, in seconds since the epoch."""
    shm = root / "dev/shm"
    cache = ""
    if machine.device == "TPU" and machine.backend == "xla":
        cache = env.get(env_vars.XLA_CACHE) or str(environment.cache_folder(env, machine))
        cache = "" if cache == "off" else cache
    hours = _HOURS.get(machine.platform)
    rank = RANK_MEMORY if machine.device == "CPU" else DEVICE_RANK_MEMORY
    return Resources(
        runs=str(runs),
        disk=_free(runs),
        shm=shutil.disk_usage(shm).total if shm.is_dir() else None,
        memory=machine.memory,
        needed=rank * cores,
        cache=cache,
        cached=size_of(Path(cache)) if cache else 0,
        left=None if hours is None else max(0.0, since + hours * 3600 - time.time()),
    )


def session_began(root: Path) -> float:
    """Start of the first process of this machine or container, in seconds since the epoch."""
    return (root / "proc/1").stat().st_mtime if (root / "proc/1").exists() else time.time()


def resource_problems(room: Resources, cores: int) -> Iterator[SetupProblem]:
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
    if room.memory < room.needed:
        yield SetupProblem(
            "memory",
            f"only {memory_size(room.memory)} of memory is free; {cores} ranks need about "
            f"{memory_size(room.needed)}, without data and model.",
            "end other processes, or use fewer cores (`%tpu_setup --cores N`)",
            must=False,
        )
    if room.left is not None and room.left < 3600:
        yield SetupProblem(
            "time",
            f"this session ends in {room.left / 60:.0f} min at the latest.",
            "save often (`tpunb.save(state, step)`); a later run continues from there with "
            "--resume",
            must=False,
        )


def _free(folder: Path) -> int:
    """Bytes free on the disk of `folder`, or of its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
