"""Values in files of torch.save, with every tensor on the CPU: checkpoints, and returned values."""

from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from tpunb.backends.xla import tensors
from tpunb.runs import heartbeat


class _WatchedFile:
    """A file whose slow writes show in the rank's heartbeat, and the CRC-32 of what it was given.

    It detects every change of up to 32 bits in a row and costs almost nothing, even on processors
    without instructions for SHA.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.crc = 0

    def write(self, data: bytes) -> int:
        """Write bytes; torch passes up to hundreds of megabytes.

        torch calls this even on a closed file: if an interrupt kept it from finishing its archive,
        its destructor finishes it, and an error in there would abort the process.
        """
        if not self._file.closed:
            with heartbeat.storing():
                self._file.write(data)
            self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def flush(self) -> None:
        """Called by torch; the file is flushed when it is closed."""


def write_value(
    value: Any, file: IO[bytes], to_cpu: tensors.CpuCopies, *, whole: bool = False
) -> int:
    """Write a value with torch.save; return the CRC-32 of the file.

    Raises the errors of writing and of pickling; with `whole`, TypeError for a DTensor.
    """

    class ToCpuPickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if whole and tensors.is_dtensor(value):
                raise TypeError("an object has a DTensor, of which each rank has only a part")
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return to_cpu(value).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            return NotImplemented

    module = ModuleType("tpunb_pickle")
    module.__dict__.update(vars(pickle), Pickler=ToCpuPickler)
    watched = _WatchedFile(file)
    try:
        torch.save(value, watched, pickle_module=module)  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch then closes its archive, which fails for the same reason and hides the error.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise
    return watched.crc


def save_value(value: Any, path: Path) -> None:
    """Write a value to a file. If its `__reduce__` raises, raises the same and leaves no file."""
    try:
        with open(path, "wb") as file:
            write_value(value, file, tensors.CpuCopies(()))
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def pickle_value(value: Any) -> bytes:
    """Return the bytes that `save_value` writes."""
    buffer = io.BytesIO()
    write_value(value, buffer, tensors.CpuCopies(()))
    return buffer.getvalue()


def describe_type(value: object) -> str:
    """'a my.module.Thing', for errors."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a {kind}"
