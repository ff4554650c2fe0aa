"""What libraries define that may be loaded: looked up, never imported."""

from __future__ import annotations

import sys
from typing import Any


def loaded(module: str, name: str) -> Any:
    """What a module has under a name, like `nn.Module` of torch; None if it has nothing yet.

    While another thread imports a library, `sys.modules` already holds it, in part.
    """
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def is_a(value: object, module: str, *names: str) -> bool:
    """Whether a value is of a class that a module defines; False if that is not loaded."""
    kinds = [kind for name in names if (kind := loaded(module, name)) is not None]
    return isinstance(value, tuple(kinds))
