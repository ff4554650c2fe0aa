"""Values between the kernel and ranks: pickled by torch, with every tensor on the CPU."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from tpunb.backends.xla import tensors
from tpunb.runs import heartbeat


class _CpuPickler(pickle.Pickler):
    """Pickles tensors of other devices, at any depth inside a value, as CPU tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            on_cpu = tensors.unwrap_sharded(value.detach().cpu())
            if isinstance(value, torch.nn.Parameter):
                on_cpu = torch.nn.Parameter(on_cpu, requires_grad=value.requires_grad)
            return on_cpu.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickle_module() -> ModuleType:
    """A pickle module for torch.save: the standard one with `_CpuPickler` as its Pickler."""
    module = ModuleType("tpunb_pickle")
    module.__dict__.update(vars(pickle), Pickler=_CpuPickler)
    return module


class _WatchedFile:
    """A file whose slow writes show in the rank's heartbeat."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Called by torch, even after an interrupt has closed the file (see Writer.write)."""
        if self._file.closed:
            return len(data)
        with heartbeat.storing():
            return self._file.write(data)

    def flush(self) -> None:
        """Called by torch; the file is flushed when it is closed."""


def save_value(value: Any, path: Path) -> None:
    """Write a value to a file. If its `__reduce__` raises, raises the same and leaves no file."""
    try:
        with open(path, "wb") as file:
            torch.save(value, _WatchedFile(file), pickle_module=_pickle_module())  # type: ignore[arg-type]
    except BaseException as error:
        path.unlink(missing_ok=True)
        # torch then closes its archive, which fails for the same reason and hides the error.
        if isinstance(error.__context__, OSError | KeyboardInterrupt):
            raise error.__context__ from None
        raise


def pickle_value(value: Any) -> bytes:
    """Return the bytes that `save_value` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_pickle_module())
    return buffer.getvalue()


def describe_type(value: object) -> str:
    """'a my.module.Thing', for errors."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return f"a {kind}"
