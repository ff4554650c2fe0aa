"""Memory and duty cycle of a run's chips or GPUs, by host.

On each host, a separate process (tpunb.machine.chip_meter) writes `chips.json` into the host's run
folder. In the folder of the whole run the files of hosts other than 0 are below `hosts/<n>/`.
Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tpunb.utils import files, records

FILE = "chips.json"
_GB = 1e9


@dataclass(frozen=True)
class Chip:
    """The latest values that libtpu reported for a chip, or for each core that is a device; or
    those of NVIDIA's driver for a GPU.
    """

    number: int
    """Its number on its host, from 0."""
    memory: int
    """Bytes of its memory in use, by all processes."""
    total: int
    """Bytes of its memory in total."""
    duty: float
    """Percent of the last seconds in which its TensorCore was busy, or a GPU ran a kernel."""
    peak: int = 0
    """The most bytes of its memory in use at once."""
    mean_duty: float | None = None
    """The duty cycle in percent while the train cell has been running; None before that."""
    host: str = ""
    """The name of its host; '' for a run on one machine."""
    kind: Literal["chip", "GPU"] = "chip"

    @property
    def name(self) -> str:
        """'2', 'host-1/2'."""
        return f"{self.host}/{self.number}" if self.host else str(self.number)

    def __str__(self) -> str:
        """'chip 2: 12.1 of 16.0 GB, 87 % busy'."""
        used = f"{self.memory / _GB:.1f} of {self.total / _GB:.1f} GB"
        return f"{self.kind} {self.name}: {used}, {self.duty:.0f} % busy"


def write_chips(run: Path, chips: Sequence[Chip]) -> None:
    """Replace the values of this host's chips. Raises OSError."""
    files.write_json(run / FILE, list(chips))


def read_chips(run: Path, hosts: Sequence[str] = ()) -> tuple[Chip, ...]:
    """Return the chips of all hosts of a run, in order of hosts; () if there are no values."""
    if not hosts:
        return _read(run / FILE, "")
    places = [run / FILE, *(run / "hosts" / str(n) / FILE for n in range(1, len(hosts)))]
    return tuple(
        chip for place, host in zip(places, hosts, strict=True) for chip in _read(place, host)
    )


def _read(path: Path, host: str) -> tuple[Chip, ...]:
    try:
        kept: tuple[Chip, ...] = records.convert(tuple[Chip, ...], records.read(path))
    except (OSError, ValueError):  # there is none, or it is another program's
        return ()
    return tuple(Chip(**{**asdict(chip), "host": host}) for chip in kept)


def describe_chips(chips: Sequence[Chip]) -> str:
    """Return 'chips: duty cycle 87 % (12 % on chip 3), memory up to 12.1 of 16.0 GB', or ''."""
    if not chips:
        return ""
    duties = {chip: chip.duty if chip.mean_duty is None else chip.mean_duty for chip in chips}
    mean = sum(duties.values()) / len(chips)
    lowest = min(chips, key=duties.__getitem__)
    kind, low = lowest.kind, duties[lowest]
    idle = f" ({low:.0f} % on {kind} {lowest.name})" if low < mean - 10 else ""
    most = max(chips, key=lambda chip: max(chip.peak, chip.memory))
    memory = f"{max(most.peak, most.memory) / _GB:.1f} of {most.total / _GB:.1f} GB"
    return f"{kind}s: duty cycle {mean:.0f} %{idle}, memory up to {memory}"
