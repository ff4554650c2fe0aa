"""Find commands that install torch or torch_xla without a matching release of the other."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

CURRENT = "2.9"
"""The release for which the rest of `tpunb.notebook` is written."""
WHY = (
    "torch and torch_xla only fit each other in pairs of one release, and torch_xla 2.9 needs "
    "torch 2.9: another in its place cannot be used with a TPU"
)

_INSTALL = re.compile(r"\b(?:pip3?|conda|mamba)\s+install\b(.*)", re.DOTALL)
_PIN = re.compile(r"(?<![\w-])(torch(?:[_-]xla)?)(?:\[[^\]]*\])?\s*(?:==|~=|=)\s*(\d+\.\d+)")
_WHEEL = re.compile(r"(?<!\w)(torch(?:_xla)?)-(nightly|\d+\.\d+)[\w.+%-]*\.whl")

_Place = TypeVar("_Place", bound=Hashable)


def pinned(command: str) -> dict[str, str]:
    """Releases of torch and torch_xla that an install command pins: `{"torch": "2.0"}`."""
    match = _INSTALL.search(command)
    if match is None:
        return {}
    found = [*_PIN.findall(match[1]), *_WHEEL.findall(match[1])]
    return {name.replace("-", "_"): release for name, release in found}


def is_pair(command: str) -> bool:
    """True if a command pins torch and torch_xla of one release."""
    pins = pinned(command)
    return len(pins) == 2 and len(set(pins.values())) == 1


def half_pairs(commands: Iterable[tuple[_Place, str]]) -> dict[_Place, str]:
    """Commands of a notebook after which torch and torch_xla do not match.

    Each comes with the names and releases that it pins: 'torch 2.0'. Matching releases are a pair
    even if different commands install them.
    """
    every = [(place, pins) for place, command in commands if (pins := pinned(command))]
    releases: dict[str, set[str]] = {}
    for _, pins in every:
        for name, release in pins.items():
            releases.setdefault(name, set()).add(release)
    torch, xla = (releases.get(name, {CURRENT}) for name in ("torch", "torch_xla"))
    if len(torch) == 1 and torch == xla:
        return {}
    return {
        place: " and ".join(f"{name} {release}" for name, release in pins.items())
        for place, pins in every
        if set(pins.values()) != {CURRENT}
    }
