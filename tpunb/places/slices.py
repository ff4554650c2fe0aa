"""TPU slices that GKE's node pools offer: accelerators, topologies, hosts and chips per host.

Topologies with 4 chips on each host (and those of one chip): AI-Hypercomputer/xpk,
`src/xpk/core/system_characteristics.py` at 02b0c092. Hosts of 8 chips, and 1x1 and 2x2 of v5e: the
machine types that public modules for GKE clusters create (ct5lp-hightpu-1t, -4t, -8t), which follow
Google's page "Plan TPUs in GKE". Labels: both.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from tpunb.machine import tpu

_CUBES = (
    "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 4x4x20 4x8x12 4x4x28 8x8x8 4x12x12 4x8x20 "
    "4x4x44 8x8x12 4x4x52 4x8x28 4x12x20 8x8x16 4x4x68 8x12x12 4x4x76 8x8x20 4x12x28 4x8x44 "
    "4x4x92 8x12x16 4x20x20 4x8x52 12x12x12 8x8x28 4x4x116 8x12x20 4x4x124 8x16x16 4x12x44 "
    "4x8x68 4x20x28 12x12x16 4x4x148 4x8x76 4x12x52 8x16x20 4x4x164 8x12x28 4x4x172 8x8x44 "
    "12x12x20 4x8x92 4x4x188 12x16x16 4x28x28 8x20x20 4x12x68 8x8x52 4x4x212 12x12x24 4x20x44 "
    "8x16x28 4x12x76 4x8x116 4x4x236 12x16x20 4x4x244 4x8x124 12x12x28 16x16x16 4x20x52 8x12x44 "
    "8x8x68 4x12x92 8x20x28 12x16x24 4x8x148 12x20x20 8x8x76 4x28x44 8x12x52 16x16x20 12x12x36 "
    "4x8x164 12x16x28 4x20x68 4x8x172 4x12x116 8x16x44 12x20x24 4x28x52 8x8x92 4x12x124 4x8x188 "
    "4x20x76 16x16x24 12x24x24 16x20x28"
)
_SQUARES = "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"


@dataclass(frozen=True)
class Accelerator:
    """A kind of TPU in GKE."""

    name: str
    """`accelerator` in places.toml: 'v6e'."""
    label: str
    """Value of its nodes' label cloud.google.com/gke-tpu-accelerator."""
    topologies: tuple[str, ...]
    """Chips along each side, the fewest first."""
    of_8: tuple[str, ...] = ()
    """Topologies that a single host of 8 chips offers as well."""


ACCELERATORS = {
    one.name: one
    for one in (
        Accelerator("v5e", "tpu-v5-lite-podslice", tuple(_SQUARES.split()), ("2x4",)),
        Accelerator("v5p", "tpu-v5p-slice", tuple(_CUBES.split())),
        Accelerator("v6e", "tpu-v6e-slice", tuple(_SQUARES.split()), ("2x4",)),
        Accelerator(
            "tpu7x", "tpu7x", ("1x1x1", *_CUBES.split(), "16x24x24", "16x16x32")
        ),
    )
}  # fmt: skip
_SHOWN = 12
"""Number of topologies that a message lists."""


@dataclass(frozen=True)
class Slice:
    """The TPU of one run."""

    accelerator: Accelerator
    topology: str
    hosts: int
    chips: int
    """Chips of each host."""

    @property
    def accelerator_type(self) -> str:
        """'v6e-16', as torch_xla and Cloud TPU name it."""
        return tpu.type_of_slice(self.accelerator.name, self.topology)


def find_slice(name: str, topology: str, chips: int | None = None) -> Slice:
    """The slice of an accelerator and a topology; `chips`: per host, if two numbers are possible.

    Raises ValueError with two arguments: the wrong setting, and the possible values.
    """
    accelerator = ACCELERATORS.get(name)
    if accelerator is None:
        raise ValueError("accelerator", f"accelerators: {', '.join(ACCELERATORS)}")
    if topology not in accelerator.topologies:
        raise ValueError("topology", f"{name} has {_possible(accelerator, topology)}")
    total = math.prod(map(int, topology.split("x")))
    usual = min(total, 4)
    fits = (usual, 8) if topology in accelerator.of_8 else (usual,)
    if chips is not None and chips not in fits:
        known = " or ".join(map(str, fits))
        raise ValueError(
            "chips_per_host", f"the hosts of a {name} of {topology} have {known} chips"
        )
    each = chips or usual
    return Slice(accelerator, topology, total // each, each)


def _possible(accelerator: Accelerator, wrong: str) -> str:
    """The accelerator's topologies for a message, preferring those similar to the wrong one."""
    known = accelerator.topologies
    close = difflib.get_close_matches(wrong, known, 3, 0.7)
    shown = list(dict.fromkeys([*close, *known]))[:_SHOWN]
    shown.sort(key=known.index)
    more = len(known) - len(shown)
    return ", ".join(shown) + (f" and {more} larger ones" if more else "")
