"""Digests of large values, to see in two processes whether they differ.

A digest holds shapes, dtypes and a sample: a value that differs elsewhere only has the same
digest, so equal digests prove nothing. Floats are compared as numbers, because sums of several
threads differ in their last digits; everything else is compared exactly. A digest is plain JSON
data. Of values whose type is not known here there is none: no code of a user's class runs.

Standard library only: numpy, torch and pandas are used where they are loaded, never imported.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from tpunb.utils.literals import literal
from tpunb.utils.modules import loaded

SAMPLE = 256
"""Items of an array that are looked at, spread over all of it."""
FEW = 16
"""The same for each array of a model or a table that holds many."""
MOST_ARRAYS = 200
_WHOLE, _PART = 1 << 20, 1 << 10
"""Characters up to which a text is read whole, and of each part of a longer one."""
TOLERANCE = 1e-3
"""Of the largest float of a sample."""

Digest = dict[str, Any]


def digest(value: object) -> Digest | None:
    """The digest of an array, a tensor, a module, a table or a container too large to be plain.

    Also of an optimizer's settings. None if there is none.
    """
    kind = type(value)
    # Classes are compared by identity: a metaclass may do it by code of its own.
    if kind is str or kind is bytes:
        return _text(value)
    if any(kind is known for known in (list, tuple, dict, set, frozenset)):
        return _container(value)
    if kind is loaded("numpy", "ndarray"):
        return _array(value, SAMPLE)
    if kind is loaded("torch", "Tensor") or kind is loaded("torch", "nn.Parameter"):
        return _tensor(value, SAMPLE)
    module = loaded("torch", "nn.Module")
    if module is not None and issubclass(kind, module):
        return _module(value)
    if kind is loaded("pandas", "DataFrame") or kind is loaded("pandas", "Series"):
        return _table(value)
    return None


def differ(one: Digest, other: Digest) -> bool:
    """Whether the values of two digests are certainly not the same."""
    if one.keys() != other.keys():
        return True
    return any(_differ(one[name], other[name]) for name in one)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return differ(one, other)
    if not (isinstance(one, list) and isinstance(other, list)):
        return bool(one != other)
    if len(one) != len(other):
        return True
    largest = max((abs(x) for x in (*one, *other) if isinstance(x, float)), default=0.0)
    return any(_unlike(a, b, largest) for a, b in zip(one, other, strict=True))


def _unlike(one: Any, other: Any, largest: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > TOLERANCE * largest
    return bool(one != other)


def _hashed(parts: Iterator[bytes]) -> str:
    whole = hashlib.blake2b(digest_size=12)
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()


def _places(count: int, most: int) -> list[int]:
    """Places from 0 to `count` - 1: all, or the same few in every process, first and last too."""
    if count <= most:
        return list(range(count))
    step = (count - 1) / (most - 1)
    # Not in one column of a table, whatever its width.
    return [
        min(count - 1, round(k * step) + (k * 7919 % 31 if 0 < k < most - 1 else 0))
        for k in range(most)
    ]


def _text(value: Any) -> Digest:
    """Its length and a hash of it, of a long one in parts with the end among them."""
    starts = [0] if len(value) <= _WHOLE else _places(len(value) - _PART, SAMPLE)
    size = _WHOLE if len(value) <= _WHOLE else _PART
    pieces = (value[at : at + size] for at in starts)
    parts = (
        piece if type(piece) is bytes else piece.encode("utf-8", "surrogatepass")
        for piece in pieces
    )
    return {"type": type(value).__name__, "length": len(value), "hash": _hashed(parts)}


def _container(value: Any) -> Digest:
    """Its length and the plain items of a sample; a set's order is not the same everywhere."""
    found: Digest = {"type": type(value).__name__, "length": len(value)}
    if type(value) in (list, tuple):
        items = [value[place] for place in _places(len(value), SAMPLE)]
        texts = [literal(item) for item in items]
        if None not in texts:
            found["hash"] = _hashed(text.encode() for text in texts if text is not None)
        elif len(value) <= FEW:
            found["items"] = {str(n): d for n, item in enumerate(items) if (d := digest(item))}
    elif type(value) is dict and len(value) <= MOST_ARRAYS:
        found["items"] = {
            key: d for key, item in value.items() if type(key) is str and (d := digest(item))
        }
    return found


def _numbers(values: Any) -> list[Any] | str:
    """A sample of a numpy array: floats as such, of anything else a hash."""
    if values.dtype.kind == "f":
        # What is not finite is compared as text: nan equals itself.
        return [float(x) if abs(x) < float("inf") else str(x) for x in values.tolist()]
    if values.dtype.kind == "c":
        return [part for x in values.tolist() for part in (x.real, x.imag)]
    return _hashed(iter([values.tobytes()]))


def _array(value: Any, most: int) -> Digest:
    found: Digest = {"type": "array", "shape": list(value.shape), "dtype": value.dtype.name}
    if value.dtype.kind in "fciubSUmM":
        found["sample"] = _numbers(value.flat[_places(value.size, most)])
    return found


def _tensor(value: Any, most: int) -> Digest:
    torch = sys.modules["torch"]

    # "tensor" for a Parameter too: a kernel's and a run's differ in nothing else.
    found: Digest = {"type": "tensor", "shape": list(value.shape), "dtype": str(value.dtype)}
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
        return found
    # By index, so that nothing large is copied; and too few for several threads.
    places = _places(value.numel(), most)
    indices: list[Any] = []
    for size in reversed(value.shape):
        indices.insert(0, torch.tensor([place % size for place in places], dtype=torch.int64))
        places = [place // size for place in places]
    sample = value.detach()[tuple(indices)].reshape(-1)
    if sample.is_complex():
        sample = torch.view_as_real(sample).reshape(-1)
    if sample.is_floating_point():
        sample = sample.double()
    found["sample"] = _numbers(sample.numpy())
    return found


def _module(value: Any) -> Digest:
    """The parameters and buffers, found without the class's own methods."""
    torch = sys.modules["torch"]

    found: Digest = {"type": "module"}
    seen: set[int] = set()
    todo = [("", value)]
    while todo and len(found) <= MOST_ARRAYS:
        path, module = todo.pop(0)
        if id(module) in seen or (inner := own_attributes(module)) is None:
            continue
        seen.add(id(module))
        for kind in ("_parameters", "_buffers"):
            for name, tensor in _items(inner.get(kind)):
                if type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter:
                    found[f"{path}{name}"] = _tensor(tensor, FEW)
        todo += [(f"{path}{name}.", child) for name, child in _items(inner.get("_modules"))]
    return found


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if type(value) in (dict, OrderedDict) else []


def own_attributes(value: object) -> dict[str, Any] | None:
    """The `__dict__` of an object, whatever its class makes of attributes; None if it has none."""
    for base in type.__getattribute__(type(value), "__mro__"):
        attribute = type.__getattribute__(base, "__dict__").get("__dict__")
        if attribute is not None:
            if type(attribute) is not type(_GENUINE):
                return None
            inner = attribute.__get__(value)
            return inner if type(inner) is dict else None
    return None


class _Plain:
    pass


_GENUINE = _Plain.__dict__["__dict__"]


def _table(value: Any) -> Digest:
    """A sample of each column of a pandas table. Items of other types than text are not read."""
    frame = value.to_frame() if value.ndim == 1 else value
    found: Digest = {"type": "table", "shape": list(value.shape)}
    rows = frame.iloc[_places(len(frame), FEW)]
    for at in range(min(frame.shape[1], MOST_ARRAYS)):
        column = rows.iloc[:, at]
        name = frame.columns[at]
        key = f"{at} {name}" if type(name) in (str, int) else str(at)
        found[key] = {"dtype": str(column.dtype)}
        if (
            getattr(column.dtype, "kind", "O") in "fiubmM"
            and type(column.to_numpy()).__module__ == "numpy"
        ):
            found[key] |= _array(column.to_numpy(), FEW)
        else:
            texts = [item if type(item) is str else "" for item in column]
            found[key]["sample"] = _hashed(text.encode("utf-8", "replace") for text in texts)
    return found
