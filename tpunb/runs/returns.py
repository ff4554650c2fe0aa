"""Read the values of `--returns` in the kernel from the files that rank 0 has written."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.runs.ownership import HeldFolder
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState
from tpunb.utils import files, records
from tpunb.utils.errors import TpunbError

_REPORT = 1_000_000
"""The most bytes of the report on the values."""
_FAILED = (RunState.FAILED, RunState.HUNG, RunState.LOST)


def collect_returns(result: RunResult, spec: RunSpec, run: RunDir | None = None) -> RunResult:
    """Return the result with the values of `--returns`, and the reason for each missing value.

    Values are not loaded from a failed run, nor from a folder that other users can change.
    `run`: the run folder that this process holds open since the run began, if it does; then only
    what was written into this folder is loaded. Afterwards the folder is released.
    """
    held = None if run is None else run.held
    try:
        if not spec.returns:
            return result
        if result.state in _FAILED:
            return _without(result, spec, "the run failed")
        try:
            held = held or HeldFolder(RunDir(result.dir).path)
        except (OSError, TpunbError) as error:
            return _without(result, spec, str(error))
        if held.is_replaced():
            what = f"{held.path} is not the folder that the run started in: it was replaced"
            return _without(result, spec, what)
        return _collect(result, spec, held)
    finally:
        if held is not None:
            held.close()
        if run is not None:
            run.held = None


def _without(result: RunResult, spec: RunSpec, why: str) -> RunResult:
    return replace(result, returns_failed=dict.fromkeys(spec.returns, why))


def _collect(result: RunResult, spec: RunSpec, held: HeldFolder) -> RunResult:
    report = _read_report(held)
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
                values[name] = load_value(held.path_of(f"returns/{name}.pt"))
            except Exception as error:  # a user's class may raise anything when it is rebuilt
                failed[name] = _why(error)
    return replace(result, returns=values, returns_failed=failed)


def _read_report(held: HeldFolder) -> dict[str, Any]:
    try:
        report = records.parse(files.read_start(held.path_of("returns/report.json"), _REPORT))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def load_value(path: Path) -> Any:
    """Load a value that `tpunb.backends.pickling.save_value` wrote into a `HeldFolder`.

    Only this user's processes can have written it, so it is unpickled without restrictions.
    """
    import torch

    with open(files.open_file(path), "rb") as file:
        return torch.load(file, map_location="cpu", weights_only=False)


def _why(error: Exception) -> str:
    text = str(error)
    if isinstance(error, AttributeError | pickle.UnpicklingError) and "__main__" in text:
        return (
            f"the kernel cannot rebuild it ({text}): define its class in a cell above the train "
            "cell and run that cell, or return its state_dict()"
        )
    return f"the kernel cannot rebuild it ({type(error).__name__}: {text})"
