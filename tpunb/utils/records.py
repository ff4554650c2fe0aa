"""JSON that another process wrote, and maybe not to its end, as typed values.

A disk that was full, a power cut or an editor may have left anything in a file: what is not what
it should be is a ValueError here, whatever is wrong with it. Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tpunb.utils import files

MOST = 8_000_000
"""Bytes of a file that is one JSON value: read in a tenth of a second."""
_LARGEST = 1e18
"""No time, duration, count or number of bytes is larger: some could not be shown."""

T = TypeVar("T")


def parse(text: str | bytes) -> Any:
    """What a JSON text says. Raises ValueError if it is none, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read(path: Path | str) -> Any:
    """What a JSON file says.

    Raises ValueError if it says nothing or is larger than `MOST`, OSError if it cannot be read.
    """
    data = files.read_start(path, MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"larger than {MOST} bytes")
    return parse(data)


def read_dict(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none that can be read."""
    try:
        value = read(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def build(kind: type[T], data: object) -> T:
    """A dataclass from a JSON object, checked against the types of its fields.

    Fields of a later version, which this one does not know, are left out. Raises ValueError.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"not a {kind.__name__}")
    record: Any = kind
    types = hints(record)
    try:
        return kind(**{name: convert(types[name], data[name]) for name in types if name in data})
    except TypeError:  # a field is missing
        raise ValueError(f"not a whole {kind.__name__}") from None


@cache
def hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


def convert(hint: Any, value: Any) -> Any:
    """The value as a field of this type holds it."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        return _convert_any(inner, value)
    if origin is Literal:
        if isinstance(value, str) and value in inner:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(convert(inner[0], item) for item in value)
        if len(inner) == len(value):
            return tuple(map(convert, inner, value))
    elif origin is not None:
        if issubclass(origin, Mapping) and isinstance(value, Mapping):
            return {key: convert(inner[1], item) for key, item in value.items()}
    elif isinstance(value, hint) and not isinstance(value, int | float):
        return value
    elif is_dataclass(hint):
        record: Any = hint
        return build(record, value)
    elif issubclass(hint, Enum):
        return hint(value)
    elif hint in (int, float):
        if is_number(value) and (hint is float or isinstance(value, int)):
            return value
    elif hint is bool and isinstance(value, bool):
        return value
    raise ValueError(f"{value!r:.40} is not of type {hint}")


def _convert_any(hints: tuple[Any, ...], value: Any) -> Any:
    for hint in hints:
        try:
            return convert(hint, value)
        except ValueError:
            continue
    raise ValueError(f"{value!r:.40} is of none of the types {hints}")


def is_number(value: object) -> bool:
    """Whether a value is a number that can be shown: finite, and not larger than any of ours."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) <= _LARGEST
