"""What the kernel holds of the names that a train cell reads: `kernel_values.json`.

A value is taken apart as far as it is a container of settings: a dict with texts as keys, a
`SimpleNamespace` or `argparse.Namespace`, a dataclass's instance, a class of the notebook (`class
CFG`) or an instance of one. So a setting is compared, and taken over, beside others that are no
plain values. The same functions read the kernel's names and those of a run; they run no code of a
user's class.

Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

from tpunb.utils import secrets
from tpunb.utils.digests import Digest, differ, digest, own_attributes
from tpunb.utils.literals import literal
from tpunb.utils.modules import loaded

_DEEPEST = 4
_MOST_PARTS = 300


class PartKind(str, Enum):
    """What a part of a value is."""

    LEAF = "leaf"
    DICT = "dict"
    NAMESPACE = "namespace"
    INSTANCE = "instance"
    """Of a dataclass, or of a class of the notebook with nothing but plain attributes."""
    FROZEN = "frozen"
    """Of a frozen dataclass, whose attributes are set past it."""
    CLASS = "class"


@dataclass(frozen=True)
class Part:
    """A value, or a setting in it."""

    path: str
    """What stands behind the name: '', "['lr']", '.optimizer.lr'."""
    kind: PartKind
    literal: str | None = None
    """The value as an expression, if all of it is plain and nothing in it may be a secret."""
    digest: Digest | None = None
    """Of a value that is not plain, if there is one."""
    secret: str | None = None
    """A keyed hash of what may be a secret."""

    def differs(self, other: Part) -> bool:
        """Whether two values that are not taken apart further are certainly not the same."""
        if self.secret is not None or other.secret is not None:
            return self.secret != other.secret
        if self.literal is not None or other.literal is not None:
            return self.literal != other.literal
        if self.digest is None or other.digest is None:
            return False
        return differ(self.digest, other.digest)


@dataclass(frozen=True)
class KernelName:
    """A name that the train cell reads, as the kernel holds it."""

    name: str
    parts: tuple[Part, ...]
    """The value itself first, then what is in it."""
    cell: int | None = None
    """The number of the last cell of the prelude that makes it; None: none does."""
    certain: bool = True
    """A difference can only come from what was done in the kernel: the cells make the name of
    literals, or code that the run does not repeat has bound it."""
    takes: bool = True
    """The kernel's value may stand beside all else that the cells make."""
    stale: tuple[int, ...] = ()
    """Numbers of cells that used the value in the kernel and use another in the run."""

    @property
    def plain(self) -> bool:
        """Whether the whole value is plain."""
        return self.parts[0].literal is not None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelName:
        """The inverse of `dataclasses.asdict`."""
        parts = tuple(Part(**{**part, "kind": PartKind(part["kind"])}) for part in data["parts"])
        return cls(**{**data, "parts": parts, "stale": tuple(data["stale"])})


@dataclass(frozen=True)
class KernelValues:
    """All of them, with the key of the hashes of secrets."""

    names: tuple[KernelName, ...] = ()
    key: str = ""

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelValues:
        """The inverse of `to_json`."""
        return cls(tuple(KernelName.from_json(name) for name in data["names"]), data["key"])


def value_parts(name: str, value: object, key: str) -> tuple[Part, ...]:
    """A value taken apart. `name` may show that it is a secret; `key` is that of the hashes."""
    found: list[Part] = []
    _take_apart(value, "", name, key, found)
    return tuple(found)


def _take_apart(value: object, path: str, name: str, key: str, found: list[Part]) -> None:
    kind = _kind(value)
    inner = _settings(value, kind)
    if inner is None or path.count("[") + path.count(".") >= _DEEPEST:
        found.append(_leaf(value, path, name, key))
        return
    at = len(found)
    for step, item_name, item in inner:
        _take_apart(item, f"{path}{step}", item_name, key, found)
        if len(found) - at > _MOST_PARTS:
            found[at:] = [Part(path, PartKind.LEAF, digest=digest(value))]
            return
    # The text of the whole must not hold what its parts keep back.
    text = None if any(part.secret is not None for part in found[at:]) else literal(value)
    found.insert(at, Part(path, kind, text))


def _leaf(value: object, path: str, name: str, key: str) -> Part:
    text = literal(value)
    hidden = text is not None and (
        (secrets.is_secret_name(name) and type(value) in (str, bytes, list, tuple, dict))
        or secrets.is_secret_text(text)
    )
    if hidden and value:
        hashed = hashlib.blake2b(str(text).encode(), key=key.encode(), digest_size=16)
        return Part(path, PartKind.LEAF, secret=hashed.hexdigest())
    return Part(path, PartKind.LEAF, text, digest(value) if text is None else None)


def _kind(value: object) -> PartKind:
    kind = type(value)
    if kind is type:
        own = type.__getattribute__(value, "__dict__")
        return PartKind.CLASS if own.get("__module__") == "__main__" else PartKind.LEAF
    if type(kind) is not type:
        return PartKind.LEAF
    if kind is dict:
        return PartKind.DICT
    if kind is SimpleNamespace or kind is loaded("argparse", "Namespace"):
        return PartKind.NAMESPACE
    own = type.__getattribute__(kind, "__dict__")
    attributes = own_attributes(value)
    if attributes is None:
        return PartKind.LEAF
    if (parameters := own.get("__dataclass_params__")) is not None:
        return PartKind.FROZEN if parameters.frozen else PartKind.INSTANCE
    # All of its state is plain, so it can be the kernel's as a whole.
    of_notebook = own.get("__module__") == "__main__"
    plain = of_notebook and all(literal(item) is not None for item in attributes.values())
    return PartKind.INSTANCE if plain else PartKind.LEAF


def _settings(value: Any, kind: PartKind) -> list[tuple[str, str, object]] | None:
    """The settings in a container: how each is reached, its name and value; None for a leaf."""
    if kind is PartKind.LEAF or (kind is PartKind.DICT and len(value) > _MOST_PARTS):
        return None
    if kind is PartKind.DICT:
        if not value or not all(type(key) is str for key in value):
            return None
        return [(f"[{key!r}]", key, item) for key, item in value.items()]
    if kind is PartKind.CLASS:
        own = type.__getattribute__(value, "__dict__")
        attributes: Iterable[tuple[Any, Any]] = (
            (name, item)
            for name, item in own.items()
            if literal(item) is not None or _settings(item, _kind(item)) is not None
        )
    else:
        attributes = (own_attributes(value) or {}).items()
    return [
        (f".{name}", name, item)
        for name, item in list(attributes)
        if type(name) is str and name.isidentifier() and not name.startswith("__")
    ]


@dataclass(frozen=True)
class Difference:
    """A part in which the kernel's value is not that of the run."""

    path: str
    here: Part | None
    """In the run; None: it has no such part."""
    kernel: Part | None
    """In the kernel; None: it has no such part."""
    parent: PartKind | None
    """Of the run's part around it."""


def differences(kernel: tuple[Part, ...], here: tuple[Part, ...]) -> Iterator[Difference]:
    """Where a value of the kernel and one of a run differ, the outermost parts only."""
    own = {part.path: part for part in here}
    theirs = {part.path for part in kernel}
    done: list[str] = []
    for part in kernel:
        if _within(part.path, done):
            continue
        mine = own.get(part.path)
        alike = mine is not None and mine.kind is part.kind
        if alike and part.kind is not PartKind.LEAF:
            continue
        done.append(part.path)
        if mine is None or not alike or mine.differs(part):
            yield Difference(part.path, mine, part, _parent(part.path, own))
    for part in here:
        if part.path in theirs or _within(part.path, done):
            continue
        done.append(part.path)
        yield Difference(part.path, part, None, _parent(part.path, own))


def _within(path: str, done: list[str]) -> bool:
    return any(path == outer or path.startswith((f"{outer}[", f"{outer}.")) for outer in done)


def _parent(path: str, own: Mapping[str, Part]) -> PartKind | None:
    """The kind of the longest part that `path` continues."""
    outer = [p for p in own if p != path and path.startswith(p)]
    return own[max(outer, key=len)].kind if outer else None
