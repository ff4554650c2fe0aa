"""Typed values from JSON that another process wrote, perhaps only in part.

A full disk, a power cut or an editor may have left anything in a file: whatever is wrong with it,
these functions raise ValueError. Standard library only.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tpunb.utils import files

MOST = 8_000_000
"""The most bytes of a file with one JSON value: read in a tenth of a second."""
_LARGEST = 1e18
"""The largest number accepted for a time, duration, count or size: larger ones may not print."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""One half of a character, which is a character only with the other half."""

T = TypeVar("T")


def parse(text: str | bytes) -> Any:
    """Parse a JSON text; bytes are UTF-8. Raises ValueError if it is no JSON or nested too deeply.

    A surrogate without its other half, which no file or terminal takes, is replaced.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig", "surrogatepass")
        value = json.loads(text)
        if ("\\u" in text or not text.isascii()) and _SURROGATE.search(text):
            return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read(path: Path | str) -> Any:
    """Parse a JSON file.

    Raises ValueError if it is not JSON or larger than `MOST`, OSError if it cannot be read.
    """
    data = files.read_start(path, MOST + 1)
    if len(data) > MOST:
        raise ValueError(f"larger than {MOST} bytes")
    return parse(data)


def read_dict(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if it cannot be read or is not an object."""
    try:
        value = read(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def build(kind: type[T], data: object) -> T:
    """Build a dataclass from a JSON object, checked against the types of its fields.

    Unknown fields, as later versions may have, are left out. Raises ValueError.
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
    """Return the types of a dataclass's fields, by name."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


def convert(hint: Any, value: Any) -> Any:
    """Convert a JSON value to a type. Raises ValueError."""
    if hint is Any or (hint in (str, bool) and type(value) is hint):
        return value
    origin, inner = _shape(hint)
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
    elif origin is list:
        if isinstance(value, list):
            return [convert(inner[0], item) for item in value]
    elif origin is not None:
        if issubclass(origin, Mapping) and isinstance(value, Mapping):
            return {key: convert(inner[1], item) for key, item in value.items()}
    elif isinstance(value, hint) and not isinstance(value, int | float):
        return value
    elif is_dataclass(hint):
        record: Any = hint
        return build(record, value)
    elif issubclass(hint, Enum) and isinstance(value, str):
        return hint(value)
    elif hint in (int, float) and is_number(value) and (hint is float or isinstance(value, int)):
        return value
    raise ValueError(f"{reprlib.repr(value):.40} is not of type {hint}")


@cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(hint), get_args(hint)


def _convert_any(hints: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in hints:
        return None
    for hint in hints:
        try:
            return convert(hint, value)
        except ValueError:
            continue
    raise ValueError(f"{reprlib.repr(value):.40} is of none of the types {hints}")


def is_number(value: object) -> bool:
    """True if a value is a finite number of at most 1e18, which can be printed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_LARGEST <= value <= _LARGEST
