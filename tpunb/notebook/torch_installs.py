"""Commands that install a torch or a torch_xla without the other half of the pair."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from typing import TypeVar

CURRENT = "2.9"
"""The release that the rest of `tpunb.notebook` knows."""
WHY = (
    "torch and torch_xla only fit each other in pairs of one release, and torch_xla 2.9 needs "
    "torch 2.9: another in its place cannot be used with a TPU"
)

_INSTALL = re.compile(r"\b(?:pip3?|conda|mamba)\s+install\b(.*)", re.DOTALL)
_PIN = re.compile(r"(?<![\w-])(torch(?:[_-]xla)?)(?:\[[^\]]*\])?\s*(?:==|~=|=)\s*(\d+\.\d+)")
_WHEEL = re.compile(r"(?<!\w)(torch(?:_xla)?)-(nightly|\d+\.\d+)[\w.+%-]*\.whl")
_OURS = re.compile(r"(?:\S*/)?torch(?:vision|audio|[_-]xla)?(?:[\[=<>~!-].*)?")

_Place = TypeVar("_Place", bound=Hashable)


def pinned(command: str) -> dict[str, str]:
    """The releases of torch and torch_xla that a command asks for: `{"torch": "2.0"}`."""
    match = _INSTALL.search(command)
    if match is None:
        return {}
    found = [*_PIN.findall(match[1]), *_WHEEL.findall(match[1])]
    return {name.replace("-", "_"): release for name, release in found}


def half_pairs(commands: Iterable[tuple[_Place, str]]) -> dict[_Place, str]:
    """Of the commands of a notebook those after which torch does not fit torch_xla.

    Each with the name and release that it asks for: 'torch 2.0'. What is installed in one command
    and its other half in another is a pair.
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


def only_the_pair(command: str) -> bool:
    """Whether an install command installs nothing but torch, torch_xla and torchvision."""
    match = _INSTALL.search(command)
    if match is None:
        return False
    words = [word.strip("'\"") for word in re.split(r"\s+", match[1].strip())]
    packages = [
        word
        for before, word in zip(["", *words], words, strict=False)
        # The address behind an option is where to look, unless it is that of a wheel.
        if not word.startswith("-")
        and not (before.startswith("-") and "://" in word and not word.endswith(".whl"))
    ]
    return bool(packages) and all(_OURS.fullmatch(package) for package in packages)
