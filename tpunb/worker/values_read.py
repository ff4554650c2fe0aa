"""Finds the plain values that a train cell reads: they are parameters of its run.

Found in the run, where the cells have made them, and not in the kernel, whose values may differ.
"""

from __future__ import annotations

import dataclasses
import dis
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.utils.files import write_json
from tpunb.utils.modules import loaded
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
    codes = [cells.compile(block) for block in cells.of("train")]
    seen = {name for code in codes for name in _assigned_first(code)}
    while codes and len(found) < MOST:
        for name in _read(codes.pop(0)):
            if name in seen or name not in namespace or name.startswith("_"):
                continue
            seen.add(name)
            value = namespace[name]
            codes += _codes_of(value, namespace)
            found.update(_plain(name, value))
    return dict(list(found.items())[:MOST])


def _read(code: CodeType) -> Iterator[str]:
    """Yield the global names that code reads, also in functions that it defines."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _read(constant)


def _assigned_first(code: CodeType) -> set[str]:
    """Return the names that a cell assigns before it reads them."""
    first: dict[str, str] = {}
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_NAME", "STORE_NAME"):
            first.setdefault(str(step.argval), step.opname)
    return {name for name, step in first.items() if step == "STORE_NAME"}


def _codes_of(value: object, namespace: dict[str, Any]) -> list[CodeType]:
    """Return the code of a function of the notebook, or of the functions of a class of it."""
    if isinstance(value, FunctionType):
        return [value.__code__] if value.__globals__ is namespace else []
    if isinstance(value, type) and value.__module__ == "__main__":
        inner = [_codes_of(each, namespace) for each in list(vars(value).values())]
        return [code for codes in inner for code in codes]
    return []


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
