"""Free disk, shared memory and memory, and the time left of a session, for `tpunb doctor`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.machine import environment
from tpunb.machine.machine import RANK_MEMORY, Machine
from tpunb.machine.problem import Problem
from tpunb.utils import env_vars
from tpunb.utils.files import size_of
from tpunb.utils.text import memory_size

_GIB = 2**30
LITTLE_DISK = 2 * _GIB
"""Bytes below which a few checkpoints fill the disk."""
LITTLE_SHM = 256 * 2**20
"""Bytes below which DataLoader workers die with a bus error: batches go through /dev/shm."""
TPU_RANK_MEMORY = 3 * _GIB
"""Bytes of the host's memory that a rank on a TPU is reckoned with: torch, torch_xla, libtpu's
own buffers, a compilation. An estimate: it was not measured."""
# The longest session: Kaggle's client 2.2.5 waits that long, "the maximum notebook runtime".
_HOURS = {"kaggle": 12.0}


@dataclass(frozen=True)
class Room:
    """What a run can use up. Bytes and seconds."""

    runs: str
    """Where run folders go."""
    disk: int
    """Free where run folders go."""
    shm: int | None
    """Size of /dev/shm; None where there is none."""
    memory: int
    """Free for new processes."""
    needed: int
    """What the ranks of a run need at least."""
    cache: str = ""
    """Where compiled programs are kept; empty where they are not."""
    cached: int = 0
    """Bytes in it."""
    left: float | None = None
    """Until the platform ends the session, at the latest; None: no limit is known."""


def measure_resources(
    machine: Machine, env: Mapping[str, str], root: Path, runs: Path, cores: int, since: float
) -> Room:
    """Look. `since`: when the session began, in seconds since the epoch."""
    shm = root / "dev/shm"
    cache = ""
    if machine.device == "TPU":
        cache = env.get(env_vars.XLA_CACHE) or str(environment.cache_folder(env, machine))
        cache = "" if cache == "off" else cache
    hours = _HOURS.get(machine.platform)
    rank = TPU_RANK_MEMORY if machine.device == "TPU" else RANK_MEMORY
    return Room(
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
    """When the first process of this machine or container began, in seconds since the epoch."""
    return (root / "proc/1").stat().st_mtime if (root / "proc/1").exists() else time.time()


def resource_problems(room: Room, cores: int) -> Iterator[Problem]:
    """What there is too little of."""
    if room.disk < LITTLE_DISK:
        yield Problem(
            "disk",
            f"{memory_size(room.disk)} are free where runs are kept ({room.runs}).",
            "`tpunb clean` removes old runs; `%tpu_setup --runs DIR` keeps them elsewhere",
            must=room.disk < LITTLE_DISK / 20,
        )
    if room.shm is not None and room.shm < LITTLE_SHM:
        yield Problem(
            "shm",
            f"/dev/shm has {memory_size(room.shm)}: DataLoader workers send their batches "
            "through it, and die with a bus error when it is full.",
            "start the container with `--shm-size=8g` (Kubernetes: mount an emptyDir with medium "
            "Memory there), or use num_workers=0",
            must=False,
        )
    if room.memory < room.needed:
        yield Problem(
            "memory",
            f"{memory_size(room.memory)} of memory are free, and {cores} ranks need about "
            f"{memory_size(room.needed)} before any data or model.",
            "end other processes, or use fewer cores (`%tpu_setup --cores N`)",
            must=False,
        )
    if room.left is not None and room.left < 3600:
        yield Problem(
            "time",
            f"this session ends in {room.left / 60:.0f} min at the latest.",
            "save often (`tpunb.save(state, step)`); a later run continues with --resume",
            must=False,
        )


def _free(folder: Path) -> int:
    """Bytes free in the nearest folder that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
