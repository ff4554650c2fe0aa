"""TPU generations: their chips, and the names of accelerator types.

Nothing in this module opens a TPU: chips are counted on the PCI bus.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

GOOGLE = "0x1ae0"
"""Google's PCI vendor id."""


@dataclass(frozen=True)
class Generation:
    name: str
    """Common name: 'v5e'."""
    prefix: str
    """Prefix of accelerator types: 'v5litepod'."""
    counts: int
    """How much each chip adds to the number of an accelerator type: v4-8 has 4 chips."""
    devices: int
    """Devices that torch_xla 2.9 counts in a process that has one chip."""
    hbm: int
    """Memory per chip in GiB."""
    teraflops: int
    """Peak TFLOP/s per chip in bfloat16."""


# Names, counts, memory and teraflops: Google's pages on each generation
# (docs.cloud.google.com/tpu, read 2026-11; v2: 180 for the 4 chips of a board) and
# tpu_info/device.py 0.14; devices: torch_xla 2.9, _internal/tpu.py.
GENERATIONS = {
    one.name: one
    for one in (
        Generation("v2", "v2", counts=2, devices=2, hbm=16, teraflops=45),
        Generation("v3", "v3", counts=2, devices=2, hbm=32, teraflops=123),
        Generation("v4", "v4", counts=2, devices=1, hbm=32, teraflops=275),
        Generation("v5e", "v5litepod", counts=1, devices=1, hbm=16, teraflops=197),
        Generation("v5p", "v5p", counts=2, devices=1, hbm=95, teraflops=459),
        Generation("v6e", "v6e", counts=1, devices=1, hbm=32, teraflops=918),
        Generation("v7x", "tpu7x", counts=2, devices=1, hbm=192, teraflops=2307),
    )
}
TORCH_TPU_RANKS = {
    "v4": (1, 2, 4, 8),
    "v5e": (1, 4, 8),
    "v5p": (1, 2, 4, 8),
    "v6e": (1, 4, 8),
    "v7x": (2, 4, 8),
}
"""Numbers of ranks that torch_tpu can start on one host; it knows no other generations.

A rank has one device, of which a v7x chip has two (torch_tpu 0.2.0, _internal/utils/hardware.py).
"""
TORCH_TPU_DEVICES = {"v7x": 2}
"""Devices of a chip, if not one (the same source)."""
V2_OR_V3 = "v2 or v3"
"""The generation of PCI device id 0x0027, which both share."""
# PCI device ids: torch_xla 2.9 (_internal/tpu.py) and tpu-info. v2 and v3 share one.
_IDS = {
    "0x0027": V2_OR_V3,
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Chips of a host along x, y and z (GKE's device plugin; v4's `tpu-env`)."""
_TYPE = re.compile(r"(v\d+[a-z]*|tpu\d+x)-(\d+)")
_LABEL = re.compile(r"(?:tpu-)?(v\d+(?:-lite|[a-z])?)-(?:pod)?(?:slice|device)|(tpu\d+x)")
"""GKE's label cloud.google.com/gke-tpu-accelerator: 'tpu-v5-lite-podslice', 'tpu7x'."""


def count_chips(root: Path) -> tuple[int, str]:
    """Number and generation of the TPU chips on the PCI bus. Reading its files opens no chip."""
    generations = list(_chips(root).values())
    return len(generations), generations[0] if generations else ""


def _chips(root: Path) -> dict[Path, str]:
    """The folder of each chip below /sys, and its generation."""
    found = {}
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            number = (device / "device").read_text().strip()
        except OSError:  # a device may vanish, or be unreadable in a container
            continue
        if vendor == GOOGLE and number in _IDS:
            found[device] = _IDS[number]
    return found


def count_vfio_chips(root: Path) -> int:
    """Number of chips that torch_tpu counts: those on the bus whose IOMMU group is in /dev/vfio.

    Without one, it registers no device. Chips of the images with /dev/accelN are not among them.
    """
    known = [device for device, name in _chips(root).items() if name in TORCH_TPU_RANKS]
    links = [device / "iommu_group" for device in known]
    groups = [link.readlink().name for link in links if link.is_symlink()]
    return sum((root / "dev/vfio" / group).exists() for group in groups)


def device_files(root: Path) -> list[Path]:
    """Files that a process opens to use a TPU: /dev/vfio/N since v5e, /dev/accelN before."""
    files = [*root.glob("dev/accel[0-9]*"), *root.glob("dev/vfio/[0-9]*")]
    return sorted(path for path in files if path.name.removeprefix("accel").isdecimal())


def parse_accelerator_type(accelerator_type: str) -> tuple[Generation, int] | None:
    """Generation and chips of a whole slice: 16 for 'v5litepod-16', 4 for 'v4-8'."""
    match = _TYPE.fullmatch(accelerator_type)
    if match is None:
        return None
    prefix, number = match.group(1), int(match.group(2))
    for generation in GENERATIONS.values():
        if prefix in (generation.prefix, generation.name):
            return generation, max(1, number // generation.counts)
    return None


def type_of_slice(label: str, topology: str) -> str:
    """The accelerator type for GKE's name of a TPU and its topology (chips along x, y and z).

    'v6e-16' for 'tpu-v6e-slice' (or the generation, 'v6e') and '4x4'; '' if either is unknown.
    """
    match = _LABEL.fullmatch(label)
    short = (match[1] or match[2]).replace("-lite", "e") if match else label
    sides = topology.split("x")
    if not all(side.isdecimal() for side in sides):
        return ""
    for one in GENERATIONS.values():
        if short in (one.name, one.prefix):
            return f"{one.prefix}-{math.prod(map(int, sides)) * one.counts}"
    return ""


def type_of(generation: str, chips: int) -> str:
    """The accelerator type of a slice of one host with that many chips; '' if not known."""
    one = GENERATIONS.get(generation)
    return f"{one.prefix}-{chips * one.counts}" if one is not None and chips in _BOUNDS else ""


def topology_variables(accelerator_type: str, chips: int) -> dict[str, str]:
    """Variables that torch_xla reads instead of the metadata server's `tpu-env`.

    Only for slices of one host whose topology no other source gives; {} for any other chips.
    """
    parsed = parse_accelerator_type(accelerator_type)
    if parsed is None or parsed[1] != chips or chips not in _BOUNDS:
        return {}
    return {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": accelerator_type,
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": _BOUNDS[chips],
        "TPU_WORKER_ID": "0",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
