"""Digests of large values, to find out whether they differ between two processes.

A digest has shapes, dtypes and a sample: values that differ outside of the sample have equal
digests, so equal digests prove nothing. Floats are compared with a tolerance, because sums of
several threads differ in their last digits; everything else is compared exactly. A digest is plain
JSON data. Values of unknown types have none, so that no code of a user's class runs.

Standard library only: numpy, torch and pandas are used if they are loaded, never imported.
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
"""The number of items of an array in a sample, spread over the whole array."""
FEW = 16
"""The number of sampled items of each array of a model or table, which have many arrays."""
MOST_ARRAYS = 200
_WHOLE, _PART = 1 << 20, 1 << 10
"""The characters up to which a text is read whole, and those of each part of a longer text."""
TOLERANCE = 1e-3
"""The tolerance for floats, relative to the largest float of a sample."""

Digest = dict[str, Any]


def digest(value: object) -> Digest | None:
    """Return the digest of a string, container, array, tensor, module or table; None otherwise."""
    kind = type(value)
    # Classes are compared by identity: `==` may run code of a user's metaclass.
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
    """True if the values of two digests certainly differ."""
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
    """Return `most` places from 0 to `count` - 1, equal in every process, with first and last."""
    if count <= most:
        return list(range(count))
    step = (count - 1) / (most - 1)
    # Offsets keep the places from being all in one column of a table.
    return [
        min(count - 1, round(k * step) + (k * 7919 % 31 if 0 < k < most - 1 else 0))
        for k in range(most)
    ]


def _text(value: Any) -> Digest:
    """Digest a text: its length and a hash; of a long text, a hash of parts including the end."""
    starts = [0] if len(value) <= _WHOLE else _places(len(value) - _PART, SAMPLE)
    size = _WHOLE if len(value) <= _WHOLE else _PART
    pieces = (value[at : at + size] for at in starts)
    parts = (
        piece if type(piece) is bytes else piece.encode("utf-8", "surrogatepass")
        for piece in pieces
    )
    return {"type": type(value).__name__, "length": len(value), "hash": _hashed(parts)}


def _container(value: Any) -> Digest:
    """Digest a container: its length and, except for sets, which are unordered, sampled items."""
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
    """Return the sampled floats of a numpy array; for other dtypes, a hash."""
    if values.dtype.kind == "f":
        # Values that are not finite are compared as text, so that nan equals itself.
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

    # "tensor" for a Parameter too: the kernel's and the run's value may differ only in this.
    found: Digest = {"type": "tensor", "shape": list(value.shape), "dtype": str(value.dtype)}
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
        return found
    # By index, so that nothing large is copied; there are too few items for several threads.
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
    """Digest the parameters and buffers of a module without calling its own methods."""
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
    """Return an object's `__dict__` without running code of its class; None if it has none."""
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
    """Digest a sample of each column of a pandas table. Objects other than strings are not read."""
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
