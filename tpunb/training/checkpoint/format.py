"""What is in a checkpoint file, which is torch.save's, and whether it is whole."""

from __future__ import annotations

import zlib
from typing import IO, Any

_CHUNK = 1 << 22


def is_whole(file: IO[bytes], wanted: int) -> bool:
    """True if a file has this CRC-32.

    torch.load checks none; those that torch.save writes leave out the archive's directory.
    """
    crc = 0
    while data := file.read(_CHUNK):
        crc = zlib.crc32(data, crc)
    return crc == wanted


def read_state(file: IO[bytes], weights_only: bool) -> Any:
    """Return the state in a file, with tensors on the CPU.

    Raises pickle.UnpicklingError with `weights_only` if the file holds more than data.
    """
    import torch

    file.seek(0)
    if not weights_only:
        return torch.load(file, map_location="cpu", weights_only=False)
    with torch.serialization.safe_globals(_numpy_globals()):
        return torch.load(file, map_location="cpu", weights_only=True)


def unsafe_names(file: IO[bytes]) -> list[str]:
    """Return the classes and functions in a file that need unrestricted unpickling."""
    import torch

    file.seek(0)
    with torch.serialization.safe_globals(_numpy_globals()):
        return sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)))


def _numpy_globals() -> list[Any]:
    """Return the classes and functions of numpy arrays and scalars, which torch does not allow."""
    import numpy as np

    kinds = {type(np.dtype(code)) for code in [*np.typecodes["All"], "S1", "U1"]}
    rebuild = [np.array(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    return [np.ndarray, np.dtype, *rebuild, *sorted(kinds, key=str)]
