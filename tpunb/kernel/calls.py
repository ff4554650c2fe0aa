"""Writes a call of `tpunb.launch` as a statement that finds the kernel's function in a rank."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

from IPython.core.error import UsageError

from tpunb.kernel.options import RESULT
from tpunb.runs import arguments
from tpunb.utils import secrets
from tpunb.utils.errors import HandoffError
from tpunb.utils.literals import literal, simple

LONGEST = 200
"""Maximum characters of an argument in the text of the call; longer ones are passed in a file."""
LAMBDA = (lambda: None).__name__


@dataclass(frozen=True)
class WrittenCall:
    """A call in the form in which ranks execute it."""

    source: str
    """A statement in one line."""
    by_file: Mapping[str, object]
    """Arguments passed in a file, keyed by the function's parameter names; possible secrets too."""
    plain: Mapping[str, object]
    """The other arguments, as JSON values."""


def write_call(
    fn: Callable[..., Any], args: Sequence[Any], namespace: Mapping[str, Any]
) -> WrittenCall:
    """Return the statement with which a rank calls a function.

    `namespace` is the notebook's. Raises UsageError for arguments that the function does not
    accept, HandoffError for a function that ranks cannot find by name.
    """
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise UsageError(
            f"tpunb.launch: args must be a tuple of arguments; write args=({args!r:.60},)"
        )
    check_callable(fn)
    keywords: dict[str, Any] = {}
    while isinstance(fn, functools.partial):
        args, keywords = (*fn.args, *args), {**fn.keywords, **keywords}
        fn = fn.func
    labels = _labels(fn, args, keywords)
    prepare, name = _reach(fn, namespace)
    by_file: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    written: list[str] = []
    for label, value in zip(labels, [*args, *keywords.values()], strict=True):
        text = literal(value)
        secret = isinstance(value, str) and secrets.is_secret_name(label)
        if text is None or len(text) > LONGEST or secret or secrets.is_secret_text(text):
            by_file[label] = value
            text = f'{arguments.NAME}["{label}"]'
        else:
            plain[label] = simple(text)
        written.append(text if len(written) < len(args) else f"{label}={text}")
    return WrittenCall(f"{prepare}{RESULT} = {name}({', '.join(written)})", by_file, plain)


def name_of(fn: object) -> str:
    """Return the name of a function for messages; for a `partial`, that of its function."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    own = str(getattr(fn, "__name__", type(fn).__name__))
    return "lambda" if own == LAMBDA else own


def check_callable(fn: object) -> None:
    """Raise UsageError for an object that cannot be called, or whose call runs no code."""
    if not callable(fn):
        raise UsageError(
            f"tpunb.launch: {fn!r:.60} cannot be called; pass the function itself and its "
            "arguments, as in tpunb.launch(train, args=(0.1,))"
        )
    inner: object = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if inspect.iscoroutinefunction(inner):
        raise UsageError(
            f"tpunb.launch: {_title(inner)} is a coroutine function; launch a function that calls "
            "asyncio.run(...) with it"
        )
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise UsageError(
            f"tpunb.launch: {_title(inner)} is a generator function, and calling it runs none of "
            "its code; launch a function that iterates over it"
        )


def save_arguments(values: Mapping[str, Any], path: Path) -> None:
    """Write the arguments that are passed in a file.

    Raises HandoffError with the name of the first one that cannot be pickled.
    """
    from tpunb.backends.pickling import describe_type, save_value  # imports torch

    try:
        save_value(dict(values), path)
    except Exception as error:  # anything a user's __reduce__ may raise
        for name, value in values.items():
            try:
                save_value(value, path)
            except Exception as reason:
                raise HandoffError(
                    f"tpunb.launch: the argument `{name}`, {describe_type(value)}, cannot be "
                    f"pickled ({type(reason).__name__}: {reason}). Nothing was started. Pass the "
                    "values that it is made from and create it in the function; or create it in a "
                    "cell above and use it in the function by its name"
                ) from reason
            path.unlink()
        raise HandoffError(f"tpunb.launch: the arguments cannot be pickled: {error}") from error


def _labels(fn: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]) -> list[str]:
    """Return a label for each argument: the name of its parameter, otherwise its number."""
    numbered = [f"argument {number}" for number in range(1, len(args) + 1)]
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return [*numbered, *keywords]
    try:
        signature.bind(*args, **keywords)
    except TypeError as error:
        raise UsageError(
            f"tpunb.launch: {_title(fn)}{signature} cannot be called with "
            f"args={tuple(args)!r:.100}: {error}. (The function is called with args alone, without "
            "an index: its rank is int(os.environ['RANK']).)"
        ) from None
    names = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return [*names[: len(args)], *numbered[len(names) :], *keywords]


def _reach(fn: object, namespace: Mapping[str, Any]) -> tuple[str, str]:
    """Return a statement for the rank to run first, or '', and an expression for the function."""
    if name := _notebook_name(fn, namespace):
        return "", name
    if isinstance(fn, MethodType):
        prepare, owner = _reach(fn.__self__, namespace)
        return prepare, f"{owner}.{fn.__name__}"
    module, path = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    top = path.partition(".")[0]
    if module == "__main__":
        if top in namespace and _walk(namespace[top], path) is fn:
            return "", path
        if path == top and path in namespace:
            raise HandoffError(
                f"tpunb.launch: in the notebook, `{path}` is no longer the function that was "
                f"passed: pass the current `{path}`, or give this function a name of its own"
            )
    elif module in sys.modules and _walk(getattr(sys.modules[module], top, None), path) is fn:
        for name in _names_of(sys.modules[module], namespace):
            return "", f"{name}.{path}"
        return f"from {module} import {top} as _tpunb_{top}; ", f"_tpunb_{path}"
    raise HandoffError(
        f"tpunb.launch: ranks cannot find {_title(fn)}, which has no name in the notebook: define "
        "it with `def` at the top level of a cell above, and pass it by its name (and values that "
        "differ from run to run in args)"
    )


def _notebook_name(fn: object, namespace: Mapping[str, Any]) -> str | None:
    """Return a name of an object in the notebook, preferably its `__name__`."""
    own = getattr(fn, "__name__", "")
    if own in namespace and namespace[own] is fn:
        return str(own)
    return next(_names_of(fn, namespace), None)


def _names_of(what: object, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of an object in the notebook, except IPython's own, which begin with `_`."""
    return (name for name, value in list(namespace.items()) if value is what and name[:1] != "_")


def _walk(top: object, path: str) -> object:
    """Return the object `Outer.inner`, given the object `Outer`; None if there is none."""
    for name in path.split(".")[1:]:
        top = getattr(top, name, None)
    return top


def _title(fn: object) -> str:
    """Return '`train`', 'the lambda' or 'the object of Trainer', for errors."""
    name = getattr(fn, "__qualname__", None)
    if name is None:
        return f"the object of {type(fn).__qualname__}"
    return "the lambda" if getattr(fn, "__name__", "") == LAMBDA else f"`{name}`"
