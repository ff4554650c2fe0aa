"""Old names that still work for one release, with a warning that names the new one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def warn_renamed(old: str, new: str, stacklevel: int = 2) -> None:
    """Warn the caller's caller, once for each of its lines.

    A FutureWarning: Python hides a DeprecationWarning from a user's own modules.
    """
    warnings.warn(
        f"{old} is now {new}; the old name will be removed in the next release",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )


def renamed_arguments(
    **names: str | tuple[str, Callable[[Any], Any]],
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function accept keyword arguments by their old names, too.

    `renamed_arguments(rest="remainder")`, or with a function that converts the old value to the
    new one: `trusted=("weights_only", operator.not_)`. Calls with both names raise TypeError.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in names.keys() & kwargs.keys():
                entry = names[old]
                new, convert = (entry, None) if isinstance(entry, str) else entry
                if new in kwargs:
                    raise TypeError(f"{called}: {old} was renamed to {new}: give only one of them")
                value = kwargs.pop(old)
                kwargs[new] = value if convert is None else convert(value)
                warn_renamed(f"{called}({old}=)", f"{new}=")
            return function(*args, **kwargs)

        return call

    return decorate
