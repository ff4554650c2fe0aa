"""The version of tpunb; hatch reads it from this module when it builds the wheel."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

__version__ = "0.1.0"

PACKAGES = ("torch", "torch_xla")


def installed_versions() -> dict[str, str]:
    """Versions of this interpreter, of tpunb and of `PACKAGES`; '' for one not installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "tpunb": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = ""
    return found


@cache
def package_digest() -> str:
    """Return a digest of tpunb's own files, which may differ between clones of one version."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".yaml", ".yml") and path.is_file():
            found.update(path.relative_to(root).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
