"""Reads in the kernel what rank 0 has written for `--returns`."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpunb.models import RunResult, RunSpec
from tpunb.rundir import RunDir


def collect(result: RunResult, spec: RunSpec) -> RunResult:
    """The result with the values that arrived, and for each other name the reason.

    Values come from the person's own run, so they are unpickled without limits.
    """
    if not spec.returns:
        return result
    report = _report(RunDir(result.dir))
    values: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in spec.returns:
        entry = report.get(name)
        if entry is None:
            failed[name] = "rank 0 did not reach the end of the train cell"
        elif "error" in entry:
            failed[name] = entry["error"]
        else:
            try:
                values[name] = _load(RunDir(result.dir).returns / entry["file"])
            except Exception as error:  # whatever a user's class may raise when it is rebuilt
                failed[name] = _why(error)
    return replace(result, returns=values, returns_failed=failed)


def _report(run: RunDir) -> dict[str, dict[str, str]]:
    path = run.returns / "report.json"
    if not path.exists():
        return {}
    report: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8"))
    return report


def _load(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=False)


def _why(error: Exception) -> str:
    text = str(error)
    if isinstance(error, AttributeError | pickle.UnpicklingError) and "__main__" in text:
        return (
            f"the kernel cannot rebuild it ({text}): define its class in a cell above the train "
            "cell and run that cell, or return its state_dict()"
        )
    return f"the kernel cannot rebuild it ({type(error).__name__}: {text})"
