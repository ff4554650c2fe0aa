"""Read the values of `--returns` in the kernel from the files that rank 0 has written."""

from __future__ import annotations

import errno
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpunb.runs import ownership
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec
from tpunb.utils import files, records


def collect_returns(result: RunResult, spec: RunSpec, *, attached: bool = False) -> RunResult:
    """Return the result with the values of `--returns`, and the reason for each missing value.

    `attached`: see `load_value`.
    """
    if not spec.returns:
        return result
    run = RunDir(result.dir)
    report = records.read_dict(run.returns / "report.json")
    values: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in spec.returns:
        entry = report.get(name)
        if not isinstance(entry, dict):
            failed[name] = "rank 0 did not reach the end of the train cell"
        elif "error" in entry:
            failed[name] = str(entry["error"])
        else:
            try:
                values[name] = load_value(run.returns / f"{name}.pt", attached=attached)
            except Exception as error:  # a user's class may raise anything when it is rebuilt
                failed[name] = _why(error)
    return replace(result, returns=values, returns_failed=failed)


def load_value(path: Path, *, attached: bool = False) -> Any:
    """Load a value that `tpunb.xla.pickling.save_value` wrote.

    The user's own processes wrote it, so it is unpickled without restrictions. For a run that this
    process did not start (`attached`), PermissionError is raised if another user owns the file.
    """
    import torch

    with open(files.open_file(path), "rb") as file:
        if attached and not ownership.is_own_file(file.fileno()):
            raise PermissionError(errno.EPERM, "another user's file", str(path))
        return torch.load(file, map_location="cpu", weights_only=False)


def _why(error: Exception) -> str:
    text = str(error)
    if isinstance(error, AttributeError | pickle.UnpicklingError) and "__main__" in text:
        return (
            f"the kernel cannot rebuild it ({text}): define its class in a cell above the train "
            "cell and run that cell, or return its state_dict()"
        )
    return f"the kernel cannot rebuild it ({type(error).__name__}: {text})"
