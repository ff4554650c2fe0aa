"""`--returns`: rank 0 writes values of the train cell for the kernel, each to its own file."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from tpunb import spmd
from tpunb.rundir import RunDir, write_json


class _ToCpu(pickle.Pickler):
    """Pickles tensors of other devices, wherever they are inside a value, as CPU tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            on_cpu = spmd.plain(value.detach().cpu())
            if isinstance(value, torch.nn.Parameter):
                on_cpu = torch.nn.Parameter(on_cpu, requires_grad=value.requires_grad)
            return on_cpu.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def _pickle_module() -> ModuleType:
    """What torch.save takes as its pickle module: the standard one with our Pickler."""
    module = ModuleType("tpunb_pickle")
    module.__dict__.update(vars(pickle), Pickler=_ToCpu)
    return module


def save(namespace: Mapping[str, Any], names: Iterable[str], run: RunDir) -> None:
    """Write each value to `returns/<name>.pt`, and `returns/report.json` about all.

    The report maps a name to {"file": …}, or to {"error": why} for a value that is not there
    or cannot be pickled; the others are written all the same.
    """
    run.returns.mkdir(exist_ok=True)
    report: dict[str, dict[str, str]] = {}
    pickler = _pickle_module()
    for name in names:
        if name not in namespace:
            report[name] = {"error": f"rank 0 has no variable {name!r} after the train cell"}
            continue
        path = run.returns / f"{name}.pt"
        try:
            torch.save(namespace[name], path, pickle_module=pickler)
        except Exception as error:  # anything a user's __reduce__ may raise
            path.unlink(missing_ok=True)
            report[name] = {"error": _why(namespace[name], error)}
        else:
            report[name] = {"file": path.name}
    write_json(run.returns / "report.json", report)


def _why(value: Any, error: Exception) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return (
        f"a {kind} cannot be pickled ({type(error).__name__}: {error}); "
        "return what it is made of, such as tensors, numbers or a state_dict()"
    )


def settle() -> None:
    """Finish the device's work in every rank, so that rank 0's reading of values waits for none.

    On a TPU a pending graph may hold a collective that needs all ranks.
    """
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        xla.sync(wait=True)
