"""The kernel's values of the names that a train cell reads: `kernel_values.json`.

Containers of settings are taken apart: a dict with string keys, a `SimpleNamespace` or
`argparse.Namespace`, an instance of a dataclass, a class of the notebook (`class CFG`) or an
instance of such a class. So each setting is compared and taken over by itself, even if others in
the container are not plain values. The same functions read the kernel's names and those of a run.
They run no code of a user's class.

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
    """The kind of a part of a value."""

    LEAF = "leaf"
    DICT = "dict"
    NAMESPACE = "namespace"
    INSTANCE = "instance"
    """An instance of a dataclass, or of a class of the notebook with only plain attributes."""
    FROZEN = "frozen"
    """An instance of a frozen dataclass, whose attributes are set with `object.__setattr__`."""
    CLASS = "class"


@dataclass(frozen=True)
class Part:
    """A value, or a setting in it."""

    path: str
    """The expression after the name that reaches it: '', "['lr']", '.optimizer.lr'."""
    kind: PartKind
    literal: str | None = None
    """The value as an expression; None if it is not plain or may contain a secret."""
    digest: Digest | None = None
    """The digest of a value that is not plain; None if its type has no digest."""
    secret: str | None = None
    """A keyed hash of a value that may be a secret."""

    def differs(self, other: Part) -> bool:
        """True if two leaves certainly have different values."""
        if self.secret is not None or other.secret is not None:
            return self.secret != other.secret
        if self.literal is not None or other.literal is not None:
            return self.literal != other.literal
        if self.digest is None or other.digest is None:
            return False
        return differ(self.digest, other.digest)


@dataclass(frozen=True)
class KernelName:
    """A name that the train cell reads, with its value in the kernel."""

    name: str
    parts: tuple[Part, ...]
    """The whole value, then its parts."""
    cell: int | None = None
    """The number of the last cell of the prelude that binds the name; None if no cell does."""
    certain: bool = True
    """True if a difference can only come from actions in the kernel: the cells make the value from
    literals only, or code that the run does not repeat has bound the name."""
    takes: bool = True
    """True if the run may use the kernel's value together with the other values of its cells."""
    stale: tuple[int, ...] = ()
    """Numbers of cells that used this value in the kernel but another value in the run."""

    @property
    def plain(self) -> bool:
        """True if the whole value is plain."""
        return self.parts[0].literal is not None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelName:
        """The inverse of `dataclasses.asdict`."""
        parts = tuple(Part(**{**part, "kind": PartKind(part["kind"])}) for part in data["parts"])
        return cls(**{**data, "parts": parts, "stale": tuple(data["stale"])})


@dataclass(frozen=True)
class KernelValues:
    """The content of `kernel_values.json`."""

    names: tuple[KernelName, ...] = ()
    key: str = ""
    """The key of the hashes of secrets."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict of plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelValues:
        """The inverse of `to_json`."""
        return cls(tuple(KernelName.from_json(name) for name in data["names"]), data["key"])


def value_parts(name: str, value: object, key: str) -> tuple[Part, ...]:
    """Take a value apart. `name` may show that it is a secret; `key` is the key of the hashes."""
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
    # The text of the whole value must not contain the secrets that its parts omit.
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
    # If all of its state is plain, the kernel's instance can be taken over as a whole.
    of_notebook = own.get("__module__") == "__main__"
    plain = of_notebook and all(literal(item) is not None for item in attributes.values())
    return PartKind.INSTANCE if plain else PartKind.LEAF


def _settings(value: Any, kind: PartKind) -> list[tuple[str, str, object]] | None:
    """Return the settings in a container: the access, name and value of each; None for a leaf."""
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
    """A part whose value in the kernel differs from that in the run."""

    path: str
    here: Part | None
    """The part in the run; None if it does not exist there."""
    kernel: Part | None
    """The part in the kernel; None if it does not exist there."""
    parent: PartKind | None
    """The kind of the part in the run that contains it."""


def differences(kernel: tuple[Part, ...], here: tuple[Part, ...]) -> Iterator[Difference]:
    """Yield the outermost parts in which a value of the kernel and one of a run differ."""
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
    """Return the kind of the innermost part that contains `path`."""
    outer = [p for p in own if p != path and path.startswith(p)]
    return own[max(outer, key=len)].kind if outer else None
