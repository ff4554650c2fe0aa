"""Typed values from JSON that another process wrote, perhaps only in part.

A full disk, a power cut or an editor may have left anything in a file: whatever is wrong with it,
these functions raise ValueError. Standard library only.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

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
    kinds = _fields(record)
    try:
        return kind(**{name: as_kind(data[name]) for name, as_kind in kinds if name in data})
    except TypeError:  # a field is missing
        raise ValueError(f"not a whole {kind.__name__}") from None


@cache
def hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


@cache
def _fields(kind: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((name, _converter(hint)) for name, hint in hints(kind).items())


def convert(hint: Any, value: Any) -> Any:
    """Convert a JSON value to a type. Raises ValueError."""
    return _converter(hint)(value)


@cache
def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return what converts values to a type, which is looked at once."""
    origin, inner = get_origin(hint), get_args(hint)

    def refuse(value: Any) -> NoReturn:
        raise ValueError(f"{reprlib.repr(value):.40} is not of type {hint}")

    if hint is Any:
        return lambda value: value
    if origin is Literal:
        return lambda v: v if isinstance(v, str) and v in inner else refuse(v)
    kinds = [_converter(kind) for kind in inner if kind is not Ellipsis]
    if origin in (Union, UnionType):
        optional = type(None) in inner
        return lambda v: None if v is None and optional else _first_of(kinds, v)
    if origin is tuple and inner[-1] is Ellipsis:
        [item] = kinds
        return lambda v: tuple(map(item, v)) if isinstance(v, (list, tuple)) else refuse(v)
    if origin is tuple:
        return lambda v: (
            tuple(kind(item) for kind, item in zip(kinds, v, strict=True))
            if isinstance(v, (list, tuple)) and len(v) == len(kinds)
            else refuse(v)
        )
    if origin is list:
        return lambda v: [*map(kinds[0], v)] if isinstance(v, list) else refuse(v)
    if origin is not None:
        return lambda v: (
            {k: kinds[1](i) for k, i in v.items()} if isinstance(v, Mapping) else refuse(v)
        )
    if hint in (int, float):
        return lambda v: v if isinstance(v, (hint, int)) and is_number(v) else refuse(v)
    if is_dataclass(hint):
        kind: Any = hint
        return lambda v: v if isinstance(v, kind) else build(kind, v)
    if issubclass(hint, Enum):
        return lambda v: hint(v) if isinstance(v, str) else refuse(v)
    return lambda v: v if isinstance(v, hint) else refuse(v)


def _first_of(kinds: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    for kind in kinds:
        try:
            return kind(value)
        except ValueError:
            continue
    raise ValueError(f"{reprlib.repr(value):.40} is of none of the types")


def is_number(value: object) -> bool:
    """True if a value is a finite number of at most 1e18, which can be printed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_LARGEST <= value <= _LARGEST
