"""Look up names of libraries that may be loaded, without importing them."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """Return a name of a module, such as `nn.Module` of torch; None if it is not loaded (yet).

    While another thread imports a library, `sys.modules` already has it, with part of its names.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_a(value: object, module: str, *names: str) -> bool:
    """True if a value is an instance of a class of a module; False if that is not loaded."""
    kinds = [kind for name in names if (kind := loaded(module, name)) is not None]
    return isinstance(value, tuple(kinds))
