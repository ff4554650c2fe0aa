"""What a rank has done so far, as the few shared bytes of its pulse say it.

Standard library only: the rank writes it (`worker.pulse`), the guard and the kernel read it.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from pathlib import Path

_FORMAT = struct.Struct("<7Q")
SIZE = _FORMAT.size


@dataclass
class Beat:
    """All are counts that only grow."""

    train: int = 0
    """1 once the train cell has begun."""
    collectives_begun: int = 0
    collectives_ended: int = 0
    steps: int = 0
    """`torch_xla.sync()` and what calls it (torch_xla's counter MarkStep)."""
    compilations_begun: int = 0
    compilations_ended: int = 0
    compile_nanoseconds: int = 0
    """Of the compilations that have ended."""

    @property
    def compiling(self) -> bool:
        """Whether XLA compiles a program now, which may take many minutes."""
        return self.compilations_begun > self.compilations_ended

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks in a collective now."""
        return self.collectives_begun > self.collectives_ended

    def pack_into(self, memory: bytearray | memoryview | object) -> None:
        """Write it where the readers look."""
        _FORMAT.pack_into(memory, 0, *astuple(self))  # type: ignore[arg-type]


def read(path: Path | str) -> Beat | None:
    """The last beat of a rank; None before its first."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    return Beat(*_FORMAT.unpack(data)) if len(data) == SIZE else None
