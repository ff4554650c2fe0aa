"""What this machine is, from signs that are safe to read: nothing here touches a TPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpunb.models import Device

GOOGLE = "0x1ae0"
# PCI device ids and names: torch_xla 2.9 (_internal/tpu.py) and tpu-info.
TPU_IDS = {
    "0x0027": "v2 or v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
REHEARSAL_CORES = 4
RANK_MEMORY = 250 * 2**20
"""Bytes that a rehearsal rank needs at least, with torch_xla's runtime started (measured)."""


@dataclass(frozen=True)
class Machine:
    """What was found."""

    platform: str
    """'colab', 'kaggle' or 'local' (any other machine)."""
    device: Device
    """What ranks will run on."""
    chips: int
    """TPU chips of this host; 0 without a TPU."""
    generation: str
    """'v5e', …; empty without a TPU."""
    processors: int
    memory: int
    """Bytes that are free for new processes."""

    @property
    def default_cores(self) -> int:
        """Ranks of a run that does not say how many."""
        return self.chips if self.device == "TPU" else REHEARSAL_CORES

    @property
    def most_rehearsal_cores(self) -> int:
        """Ranks that fit into memory, however slowly they run."""
        return max(REHEARSAL_CORES, min(256, self.memory // RANK_MEMORY))

    def check_cores(self, cores: int) -> str | None:
        """Why this many ranks cannot run here and what can; None if they can."""
        if cores < 1:
            return f"{cores} cores: at least 1 is needed"
        if self.device == "TPU" and cores not in (1, self.chips):
            return (
                f"{cores} cores: this TPU has {self.chips} chips, and torch_xla runs on 1 "
                f"or on all of them (--cores 1 or --cores all)"
            )
        if self.device == "CPU" and cores > self.most_rehearsal_cores:
            free = self.memory / 2**30
            return (
                f"{cores} cores: at most {self.most_rehearsal_cores} rehearsal ranks fit into "
                f"the {free:.0f} GiB that are free here (each needs at least "
                f"{RANK_MEMORY / 2**30:.2f} GiB). A TPU host has 1, 4 or 8 cores."
            )
        return None


def detect(env: Mapping[str, str], pci: Path = Path("/sys/bus/pci/devices")) -> Machine:
    """Look at this machine. `env` is the environment of the person's session.

    PJRT_DEVICE, where a person has set it, decides between TPU and CPU.
    """
    chips, generation = _chips(pci)
    wanted = env.get("PJRT_DEVICE", "")
    device: Device = "TPU" if wanted == "TPU" or (chips and wanted != "CPU") else "CPU"
    return Machine(
        platform=_platform(env),
        device=device,
        chips=chips,
        generation=generation,
        processors=len(os.sched_getaffinity(0)),
        memory=_free_memory(),
    )


def _platform(env: Mapping[str, str]) -> str:
    if "COLAB_RELEASE_TAG" in env:
        return "colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in env:
        return "kaggle"
    return "local"


def _chips(pci: Path) -> tuple[int, str]:
    """TPU chips on the PCI bus and their generation. Reading these files takes no chip."""
    found = []
    for device in sorted(pci.glob("*")) if pci.is_dir() else []:
        try:
            vendor = (device / "vendor").read_text().strip()
            number = (device / "device").read_text().strip()
        except OSError:  # a device may vanish, or be unreadable in a container
            continue
        if vendor == GOOGLE and number in TPU_IDS:
            found.append(TPU_IDS[number])
    return len(found), found[0] if found else ""


def _free_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
