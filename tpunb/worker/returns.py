"""`--returns`: rank 0 writes values of the train cell for the kernel, each to its own file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from tpunb.backends.pickling import describe_type, save_value
from tpunb.runs.directory import RunDir
from tpunb.utils.files import write_json


def save_returns(namespace: Mapping[str, Any], names: Iterable[str], run: RunDir) -> None:
    """Write each value to `returns/<name>.pt`, and a report on all to `returns/report.json`.

    The report maps a name to {"file": …}, or to {"error": why} for a value that does not exist
    or cannot be pickled; the other values are still written.
    """
    run.returns.mkdir(exist_ok=True)
    report: dict[str, dict[str, str]] = {}
    for name in names:
        if name not in namespace:
            why = f"rank 0 has no variable {name!r} after the train cell"
            near = difflib.get_close_matches(name, namespace, 1, 0.7)
            report[name] = {"error": f"{why}; did you mean {near[0]}?" if near else why}
            continue
        path = run.returns / f"{name}.pt"
        try:
            save_value(namespace[name], path)
        except Exception as error:  # the user's __reduce__ may raise anything
            report[name] = {"error": _why(namespace[name], error)}
        else:
            report[name] = {"file": path.name}
    write_json(run.returns / "report.json", report)


def _why(value: Any, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"the value could not be written ({error})"
    return (
        f"{describe_type(value)} cannot be pickled ({type(error).__name__}: {error}); "
        "return its parts instead, such as tensors, numbers or a state_dict()"
    )
