"""Plain values, and their Python source.

Plain values are numbers, strings, booleans, None, `pathlib` paths and `range`; scalars, 0-d arrays
or tensors and dtypes of numpy and torch; and small lists, tuples, sets and dicts of these. Types
must match exactly: instances of a subclass may run code of their own when they are compared, shown
or copied, and such code must not run. Libraries are never imported: a library that is not loaded
has made no value.

Standard library only.
"""

from __future__ import annotations

import ast
import math
import pathlib
from typing import Any

from tpunb.utils.modules import loaded
from tpunb.utils.text import excerpt

MOST_ITEMS = 1000
"""The most items of a container, including those of nested containers."""
LONGEST = 20_000
"""The most characters of a literal."""
_DEEPEST = 8
_WIDEST = 4096
"""The most bits of an integer: Python refuses to convert much longer ones to decimals."""

_PATHS: dict[type, str] = {type(pathlib.Path()): "Path", pathlib.PurePosixPath: "PurePosixPath"}


class _NotPlainError(Exception):
    """The value is not plain, or too large."""


def literal(value: object) -> str | None:
    """Return an expression for a value that works in any namespace; None if it is not plain.

    Equal texts mean equal types and values: 1, 1.0 and True differ, nan equals itself. Items of a
    set are sorted by their texts; items of a dict keep their order.
    """
    try:
        text = _Writer().write(value, 0)
    except _NotPlainError:
        return None
    return text if len(text) <= LONGEST else None


def literal_of(node: ast.expr) -> str | None:
    """Return what an expression in a cell certainly is, as `literal` does; None if not plain.

    It may be made of literals, arithmetic of numbers, `float("inf")`, `Path("data")`, `torch.int8`.
    """
    name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
    if name.startswith("torch."):
        kind = type(loaded("torch", name.removeprefix("torch.")))
        return f'__import__("torch").{node.attr}' if kind is loaded("torch", "dtype") else None  # type: ignore[attr-defined]
    try:
        return literal(_evaluate(node))
    except (ValueError, TypeError, ArithmeticError, LookupError, RecursionError):
        return None


_MAKERS = {"float": float, "Path": pathlib.Path, "pathlib.Path": pathlib.Path}
_MOST_POWER = 1024
"""The largest number in a power: a longer result is no setting."""


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return _MAKERS[ast.unparse(node.func)](ast.literal_eval(node.args[0]))
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right = _evaluate(node.left), _evaluate(node.right)
    if not all(isinstance(each, int | float) for each in (left, right)):
        raise ValueError
    if isinstance(node.op, ast.Pow | ast.LShift) and max(abs(left), abs(right)) > _MOST_POWER:
        raise ValueError
    numbers = ast.Expression(ast.BinOp(ast.Constant(left), node.op, ast.Constant(right)))
    code = compile(ast.fix_missing_locations(numbers), "<text>", "eval")
    return eval(code, {"__builtins__": {}})


def shown(text: str, most: int = 60) -> str:
    """Return a literal for display: without `__import__`, and cut to the length of a line."""
    text = text.replace('__import__("', "").replace('").', ".")
    return excerpt(text, most)


def simple(text: str) -> Any:
    """Return a literal's value if it is a number, string, boolean or None; otherwise `shown`."""
    node = ast.parse(text, mode="eval").body
    if isinstance(node, ast.Call) and node.args:  # float("inf"), a scalar of numpy or torch
        if isinstance(node.func, ast.Name) and node.func.id == "float":
            return float(ast.literal_eval(node.args[0]))
        node = node.args[0]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return shown(text)
    return value if isinstance(value, (bool, int, float, str, type(None))) else shown(text)


class _Writer:
    def __init__(self) -> None:
        self._items = 0

    def write(self, value: Any, depth: int) -> str:
        kind = type(value)
        if type(kind) is not type:  # comparing classes may run code of a metaclass
            return _of_libraries(value)
        if value is None or kind is bool:
            return repr(value)
        if kind is int:
            return repr(self._checked(value))
        if kind is float:
            return _float(value)
        if kind is complex:
            if not (math.isfinite(value.real) and math.isfinite(value.imag)):
                raise _NotPlainError
            return repr(value)
        if kind in (str, bytes):
            if len(value) > LONGEST:
                raise _NotPlainError
            return repr(value)
        if kind in (list, tuple, dict, set, frozenset):
            return self._container(value, depth + 1)
        if kind is range:
            return repr(value)
        if kind in _PATHS:
            return f'__import__("pathlib").{_PATHS[kind]}({str(value)!r})'
        return _of_libraries(value)

    def _checked(self, value: int) -> int:
        if value.bit_length() > _WIDEST:
            raise _NotPlainError
        return value

    def _container(self, value: Any, depth: int) -> str:
        self._items += len(value)
        if depth > _DEEPEST or self._items > MOST_ITEMS:
            raise _NotPlainError
        if type(value) is dict:
            items = (
                f"{self.write(key, depth)}: {self.write(item, depth)}"
                for key, item in value.items()
            )
            return f"{{{', '.join(items)}}}"
        texts = [self.write(item, depth) for item in value]
        if type(value) is list:
            return f"[{', '.join(texts)}]"
        if type(value) is tuple:
            return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
        braces = f"{{{', '.join(sorted(texts))}}}" if texts else ""
        if type(value) is frozenset:
            return f"frozenset({braces})"
        return braces or "set()"


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


_NUMPY = frozenset(
    "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "str_".split()
)


def _of_libraries(value: Any) -> str:
    """Return the source of a scalar or dtype of numpy or torch."""
    kind = type(value)
    generic = loaded("numpy", "generic")
    if (
        generic is not None
        and type(kind) is type
        and issubclass(kind, generic)
        and kind.__name__ in _NUMPY
    ):
        return f'__import__("numpy").{kind.__name__}({_scalar(value.item())})'
    if kind is loaded("numpy", "ndarray") and value.ndim == 0 and value.dtype.name in _NUMPY:
        return f'__import__("numpy").array({_scalar(value.item())}, {value.dtype.name!r})'
    if kind is loaded("torch", "dtype"):
        return f'__import__("torch").{str(value).removeprefix("torch.")}'
    if (
        kind is loaded("torch", "Tensor")
        and value.dim() == 0
        and not value.requires_grad
        and value.device.type == "cpu"
        and value.layout is loaded("torch", "strided")
        and not (value.is_quantized or value.is_complex())
    ):
        dtype = f'__import__("torch").{str(value.dtype).removeprefix("torch.")}'
        return f'__import__("torch").tensor({_scalar(value.item())}, dtype={dtype})'
    raise _NotPlainError


def _scalar(value: object) -> str:
    """Return the source of a number or string of Python."""
    if type(value) is float:
        return _float(value)
    return repr(value)
