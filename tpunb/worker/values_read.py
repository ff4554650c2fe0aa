"""Finds the plain values that a train cell reads: they are parameters of its run.

Found in the run, where the cells have made them, and not in the kernel, whose values may differ.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.utils.files import write_json
from tpunb.utils.modules import loaded
from tpunb.utils.names_read import names_read
from tpunb.utils.secrets import is_secret_name, is_secret_text
from tpunb.worker.cells import Cells

MOST = 50
"""The most values that are kept."""
LONGEST = 200
"""The most characters of a text that is a value."""
_PLAIN = (bool, int, float, str, type(None))


def record_values(run: RunDir, cells: Cells) -> None:
    """Before the train cell begins: write the plain values that it reads to the run folder."""
    with suppress(OSError):  # a full disk: they are only shown
        write_json(run.values_read, find_values(cells))


def find_values(cells: Cells) -> dict[str, Any]:
    """Return the values by name: numbers, strings, booleans and None.

    The train cell reads them itself, or in functions and classes of the prelude. Settings in a
    dict, or in an object of a class of the notebook, are named like 'config.lr'.
    """
    namespace = vars(cells.module)
    found: dict[str, Any] = {}
    for name in names_read(cells.tree("train"), namespace):
        if name in namespace and not name.startswith("_") and len(found) < MOST:
            found.update(_plain(name, namespace[name]))
    return dict(list(found.items())[:MOST])


def _plain(name: str, value: object) -> dict[str, Any]:
    """Return a plain value, or the plain settings in a container."""
    if type(value) in _PLAIN:
        hidden = isinstance(value, str) and (is_secret_name(name) or is_secret_text(value))
        long = isinstance(value, str) and len(value) > LONGEST
        return {} if hidden or long else {name: value}
    found: dict[str, Any] = {}
    for inner, each in _settings(value).items():
        if isinstance(inner, str) and inner.isidentifier() and not inner.startswith("_"):
            found |= _plain(f"{name}.{inner}", each) if type(each) in _PLAIN else {}
    return found


def _settings(value: object) -> dict[Any, Any]:
    """Return the settings in a dict, a namespace, a dataclass, or a class without functions."""
    if type(value) is dict:
        return value if len(value) <= MOST else {}
    if isinstance(value, type):
        own = dict(vars(value))
        return {} if any(isinstance(each, FunctionType) for each in own.values()) else own
    spaces = (SimpleNamespace, loaded("argparse", "Namespace"))
    if type(value) in spaces or dataclasses.is_dataclass(value):
        return dict(getattr(value, "__dict__", {}))
    return {}
