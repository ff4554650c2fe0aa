"""Names of libraries that may be loaded, without importing them, and where modules are found."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
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


def import_path() -> list[str]:
    """Return the `sys.path` with which another process imports what this one does.

    A relative entry means the folder that it led to when it was first searched; '' remains the
    working directory. Last are folders of imported modules that are no entries: they were the
    working directory at the time.
    """
    of_torch = loaded(
        "torch.distributed.nn.jit.instantiator", "INSTANTIATED_TEMPLATE_DIR_PATH"
    )  # a temporary folder for generated code
    path: dict[str, None] = {}
    entries: list[object] = [*sys.path]
    for entry in entries:
        if isinstance(entry, str) and entry != of_torch:  # imports ignore Path objects, too
            searched = getattr(sys.path_importer_cache.get(entry), "path", entry)
            # Not normalized: a link before ".." leads elsewhere.
            path[os.path.join(os.getcwd(), searched) if entry else ""] = None
    known = {entry.rstrip(os.sep) for entry in path} | {os.getcwd()}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        tail = f"{os.sep}{name.replace('.', os.sep)}"
        if not isinstance(file, str) or name.startswith("__"):
            continue
        stem = os.path.splitext(file)[0].removesuffix(f"{os.sep}__init__")
        folder = stem.removesuffix(tail)
        if stem.endswith(tail) and folder not in known and is_local_file(file):
            path[folder] = None
    return list(path)


def use_import_path(entries: Sequence[str]) -> None:
    """Let this process, which had another working directory, import from these folders."""
    own = [] if PACKAGE_ROOT in entries else [PACKAGE_ROOT]
    sys.path[:] = [*entries, *own]
    importlib.invalidate_caches()


def change_folder(path: str) -> None:
    """Change the working directory of this process, and of those that it spawns. Raises OSError."""
    from multiprocessing import process

    os.chdir(os.path.expanduser(path))
    # What '' in `sys.path` means in the processes that it spawns.
    process.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


@cache
def is_local_file(file: str) -> bool:
    """True if a module's file belongs neither to an installed package nor to Python.

    A package that was installed in development mode is local: its files are there to be edited.
    """
    parts = file.split(os.sep)
    standard = os.path.dirname(os.__file__)
    own = os.path.join(PACKAGE_ROOT, "tpunb") + os.sep
    if any(name in parts for name in _PACKAGES) or file.startswith((standard + os.sep, own)):
        return False
    return not any(file in _recorded(str(folder)) for folder in Path(file).parents)


@cache
def _recorded(folder: str) -> frozenset[str]:
    """The files of the packages in a folder, as `pip install --target` records them."""
    found: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with record.open(newline="", encoding="utf-8") as lines:
            found.update(os.path.join(folder, row[0]) for row in csv.reader(lines) if row)
    return frozenset(found)


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
