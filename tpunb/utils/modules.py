"""Look up names of libraries that may be loaded, without importing them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from tpunb.utils.files import PACKAGE_ROOT

_PACKAGES = ("site-packages", "dist-packages")


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


@cache
def is_local_file(file: str) -> bool:
    """True if a module's file belongs neither to an installed package nor to Python."""
    parts = file.split(os.sep)
    standard = os.path.dirname(os.__file__)
    own = os.path.join(PACKAGE_ROOT, "tpunb") + os.sep
    return not (
        any(name in parts for name in _PACKAGES) or file.startswith((standard + os.sep, own))
    )


def own_attributes(value: Any) -> Mapping[str, Any]:
    """Return the `__dict__` of an object, a class or a module without running code of its class."""
    if issubclass(type(value), type):
        found: Mapping[str, Any] = type.__getattribute__(value, "__dict__")
        return found
    for base in type.__getattribute__(type(value), "__mro__"):
        attribute = type.__getattribute__(base, "__dict__").get("__dict__")
        if attribute is not None:
            genuine = type(attribute) in (GetSetDescriptorType, MemberDescriptorType)
            inner = attribute.__get__(value) if genuine else None
            return inner if type(inner) is dict else {}
    return {}
