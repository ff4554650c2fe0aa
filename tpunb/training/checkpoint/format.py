"""The format of a checkpoint file: the output of torch.save, then a name and a checksum.

Name and checksum are the comment of the zip archive that torch.save writes, so plain `torch.load`
reads the file as well. The comment is written last: a truncated file has none, and any changed
byte makes the checksum fail.
"""

from __future__ import annotations

import os
import pickle
import zlib
from types import ModuleType
from typing import IO, Any

from tpunb.backends.xla import tensors
from tpunb.runs import heartbeat
from tpunb.training.checkpoint import sharded

END = 256
"""The length of the comment in bytes, in every file."""
_EOCD = 22
"""The length in bytes of a zip archive's last record, which ends with the comment's length."""
_CHUNK = 1 << 22


def label(name: str) -> bytes:
    """Return the comment without its last eight digits: the format version (1) and the file's name.

    The digits are the CRC-32 of all bytes before them. It detects every change of up to 32 bits
    in a row and costs almost nothing, even on processors without instructions for SHA.
    """
    return f"tpunb checkpoint 1 {name} crc32 ".encode().rjust(END - 8)


class Writer:
    """The file object that torch.save writes to: passes bytes on, adds the checksum at the end."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name
        self._crc = 0
        self._last = b""

    def _put(self, data: bytes | memoryview) -> None:
        with heartbeat.storing():
            self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)

    def write(self, data: bytes) -> int:
        """Write bytes, but hold back the last ones. torch passes up to hundreds of megabytes.

        torch calls this even on a closed file: if an interrupt kept it from finishing its archive,
        its destructor finishes it, and an error in there would abort the process.
        """
        if self._file.closed:
            return len(data)
        if len(data) < _EOCD:
            waiting = self._last + data
            self._put(waiting[:-_EOCD])
            self._last = waiting[-_EOCD:]
        else:
            self._put(self._last)
            self._put(memoryview(data)[:-_EOCD])
            self._last = bytes(memoryview(data)[-_EOCD:])
        return len(data)

    def flush(self) -> None:
        """Do nothing (torch calls this): the store flushes when the file is complete."""

    def finish(self) -> None:
        """Write the comment. Raises RuntimeError if the archive does not end as torch 2.9's do."""
        if len(self._last) != _EOCD or self._last[:4] != b"PK\x05\x06" or any(self._last[-2:]):
            raise RuntimeError("torch.save did not write a zip archive without a comment")
        self._put(self._last[:-2] + END.to_bytes(2, "little"))
        self._put(label(self._name))
        self._put(f"{self._crc:08x}".encode())


def write_state(state: Any, file: IO[bytes], name: str, to_cpu: tensors.CpuCopies) -> None:
    """Write a state to a file, with the comment.

    Raises the errors of writing to the file and of pickling.
    """
    import torch

    writer = Writer(file, name)
    try:
        torch.save(state, writer, pickle_module=pickler(to_cpu))  # type: ignore[arg-type]
    except RuntimeError as error:
        # torch closes its archive on the way out, which fails for this reason and hides it.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise
    writer.finish()


def pickler(to_cpu: tensors.CpuCopies) -> ModuleType:
    """Return a pickle module for torch.save that moves tensors to the CPU."""
    import torch

    class ToCpu(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if sharded.is_dtensor(value):
                raise TypeError("it is inside an object, which has only a part of it")
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                return to_cpu(value).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
            return NotImplemented

    module = ModuleType("tpunb_pickle")
    module.__dict__.update(vars(pickle), Pickler=ToCpu)
    return module


class _NullFile:
    def write(self, data: bytes) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def find_unpicklable(state: Any, to_cpu: tensors.CpuCopies) -> tuple[str, Any] | None:
    """Find what cannot be pickled in a state: its path, such as `['optimizer']['hook']`, and value.

    It is the innermost such part inside dicts, lists and tuples. None if all can be pickled.
    """
    import torch

    module = pickler(to_cpu)

    def fails(value: Any) -> bool:
        try:
            torch.save(value, _NullFile(), pickle_module=module)  # type: ignore[arg-type]
        except Exception:  # anything a user's __reduce__ may raise
            return True
        return False

    path = ""
    if not fails(state):
        return None
    while True:
        items: Any = ()
        if isinstance(state, dict):
            items = state.items()
        elif isinstance(state, list | tuple):
            items = enumerate(state)
        failing = next(((key, value) for key, value in items if fails(value)), None)
        if failing is None:
            return path, state
        path += f"[{failing[0]!r}]"
        state = failing[1]


def has_end(tail: bytes, name: str) -> bool:
    """True if a file's last END bytes are the comment of a complete file of this name."""
    return len(tail) == END and tail[:-8] == label(name)


def is_whole(file: IO[bytes], name: str) -> bool:
    """True if no byte has changed since the file was written. Reads the whole file."""
    crc, last = 0, b""
    while data := file.read(_CHUNK):
        if len(data) < 8:
            data = last + data
        else:
            crc = zlib.crc32(last, crc)
        crc = zlib.crc32(memoryview(data)[:-8], crc)
        last = data[-8:]
    return last == f"{crc:08x}".encode() and _tail(file, name)


def _tail(file: IO[bytes], name: str) -> bool:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - END, 0))
    return has_end(file.read(END), name)


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
