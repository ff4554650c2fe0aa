"""Takes a value apart into its settings, so that each is compared and taken over by itself.

Containers of settings are a dict with string keys, a `SimpleNamespace` or `argparse.Namespace`,
an object of a class of the notebook or of a dataclass, such a class itself (`class CFG`), and a
module of the user's. No code of the user's runs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

from tpunb.kernel.marks import mark
from tpunb.utils import secrets
from tpunb.utils.literals import literal
from tpunb.utils.modules import is_own_module, loaded, own_attributes

_OF_IPYTHON = re.compile(
    r"_{1,3}|_i{1,3}|_i?\d+|In|Out|_ih|_oh|_dh|__\w+__|exit|quit|open|get_ipython"
)
_DEEPEST = 4
_MOST_PARTS = 300


class PartKind(Enum):
    LEAF = "leaf"
    DICT = "dict"
    NAMESPACE = "namespace"
    OBJECT = "object"
    FROZEN = "frozen"
    """An instance of a frozen dataclass, whose attributes are set with `object.__setattr__`."""
    CLASS = "class"


@dataclass(frozen=True)
class Part:
    """A value, or a setting in it."""

    path: str
    """The expression after the name that reaches it: '', "['lr']", '.optimizer.lr'."""
    kind: PartKind
    literal: str | None
    """The value as an expression; None if it is not plain."""
    hash: bytes | None
    """The mark of a leaf that is not plain, or of an object's class."""
    secret: bool = False
    """True if it may be a secret: it must not be written anywhere."""

    @property
    def taken(self) -> str | None:
        """The expression that gives a run this value; None if it cannot be taken over."""
        return None if self.secret else self.literal

    def same(self, other: Part) -> bool:
        """True if both parts were equal when they were taken apart."""
        return (self.kind, self.literal, self.hash) == (other.kind, other.literal, other.hash)


def parts_of(name: str, value: object) -> tuple[Part, ...]:
    """Return the whole value, then its parts. `name` may show that it is a secret."""
    found: list[Part] = []
    _take_apart(value, "", name, found)
    return tuple(found)


def top_level(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return a value and its outermost parts, each as a whole."""
    inner = {part.path: part for part in parts[1:]}
    outer = [part for path, part in inner.items() if _parent(path, inner) is None]
    return (
        parts[0],
        *(replace(p, kind=PartKind.LEAF, hash=p.hash or _hash_of(p, parts)) for p in outer),
    )


def _hash_of(whole: Part, parts: tuple[Part, ...]) -> bytes | None:
    inner = [part for part in parts if _within(part.path, [whole.path])]
    return repr(inner).encode() if len(inner) > 1 else None


class PlainNames(Container[str]):
    """The names of plain values in the kernel, which a run may be given."""

    def __init__(self, user_ns: Mapping[str, object]) -> None:
        self._user_ns = user_ns

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or name not in self._user_ns or is_of_ipython(name):
            return False
        return is_plain(name, self._user_ns[name])

    def __deepcopy__(self, memo: object) -> PlainNames:
        """Return self: nbconvert copies its steps' resources, but a kernel's values must not be."""
        return self


def is_of_ipython(name: str) -> bool:
    """True for names that IPython or Python define in a notebook, such as `_`, `In`, `exit`."""
    return _OF_IPYTHON.fullmatch(name) is not None


def is_plain(name: str, value: object) -> bool:
    """True if a run may be given the value of a variable."""
    return parts_of(name, value)[0].taken is not None


def _take_apart(value: object, path: str, name: str, found: list[Part]) -> None:
    kind = _kind(value)
    inner = _settings(value, kind)
    if inner is None or path.count("[") + path.count(".") >= _DEEPEST:
        found.append(_leaf(value, path, name))
        return
    at = len(found)
    for step, item_name, item in inner:
        _take_apart(item, f"{path}{step}", item_name, found)
        if len(found) - at > _MOST_PARTS:
            found[at:] = [Part(path, PartKind.LEAF, None, mark(value).hash)]
            return
    secret = any(part.secret for part in found[at:])
    of_class = kind is PartKind.OBJECT or kind is PartKind.FROZEN
    hashed = mark(type(value)).hash if of_class else None
    found.insert(at, Part(path, kind, literal(value), hashed, secret))


def _leaf(value: object, path: str, name: str) -> Part:
    text = literal(value)
    secret = text is not None and (
        (secrets.is_secret_name(name) and type(value) in (str, bytes, list, tuple, dict))
        or secrets.is_secret_text(text)
    )
    hashed = mark(value).hash if text is None else None
    return Part(path, PartKind.LEAF, text, hashed, secret and bool(value))


def _kind(value: object) -> PartKind:
    kind = type(value)
    if kind is type:
        return PartKind.CLASS if is_own_module(vars(value).get("__module__")) else PartKind.LEAF
    if type(kind) is not type:
        return PartKind.LEAF
    if kind is dict:
        return PartKind.DICT
    if kind is SimpleNamespace or kind is loaded("argparse", "Namespace"):
        return PartKind.NAMESPACE
    if kind is ModuleType:
        name = value.__dict__.get("__name__")
        return PartKind.CLASS if name != "__main__" and is_own_module(name) else PartKind.LEAF
    own = type.__getattribute__(kind, "__dict__")
    torch_module = loaded("torch", "nn.Module")
    if torch_module is not None and issubclass(kind, torch_module):
        return PartKind.LEAF  # half of a model's changes would be worse than none
    if own_attributes(value) is None:
        return PartKind.LEAF
    if (parameters := own.get("__dataclass_params__")) is not None:
        return PartKind.FROZEN if parameters.frozen else PartKind.OBJECT
    return PartKind.OBJECT if is_own_module(own.get("__module__")) else PartKind.LEAF


def _settings(value: Any, kind: PartKind) -> list[tuple[str, str, object]] | None:
    """Return the settings in a container: the access, name and value of each; None for a leaf."""
    if kind is PartKind.LEAF or (kind is PartKind.DICT and len(value) > _MOST_PARTS):
        return None
    if kind is PartKind.DICT:
        items = list(value.items())  # at once: another thread may change it
        if not items or not all(type(key) is str for key, _ in items):
            return None
        return [(f"[{key!r}]", key, item) for key, item in items]
    if issubclass(type(value), type):
        attributes = dict(type.__getattribute__(value, "__dict__"))
    elif type(value) in (ModuleType, SimpleNamespace):
        attributes = dict(value.__dict__)
    else:
        attributes = dict(own_attributes(value) or {})
    return [
        (f".{name}", name, item)
        for name, item in attributes.items()
        if type(name) is str and name.isidentifier() and not name.startswith("__")
    ]


@dataclass(frozen=True)
class SettingDifference:
    """A part whose value in the kernel differs from that in the run."""

    path: str
    here: Part | None
    """The part in the run; None if it does not exist there."""
    kernel: Part | None
    """The part in the kernel; None if it does not exist there."""
    parent: PartKind | None
    """The kind of the part in the run that contains it."""


def differences(kernel: tuple[Part, ...], here: tuple[Part, ...]) -> Iterator[SettingDifference]:
    """Yield the outermost parts in which a value of the kernel and one of a run differ."""
    own = {part.path: part for part in here}
    theirs = {part.path for part in kernel}
    done: list[str] = []
    for part in kernel:
        if _within(part.path, done):
            continue
        mine = own.get(part.path)
        apart = mine is not None and mine.kind is part.kind and part.kind is not PartKind.LEAF
        if apart and mine is not None and mine.hash == part.hash:
            continue
        done.append(part.path)
        if mine is None or not mine.same(part):
            yield SettingDifference(part.path, mine, part, _parent(part.path, own))
    for part in here:
        if part.path not in theirs and not _within(part.path, done):
            done.append(part.path)
            yield SettingDifference(part.path, part, None, _parent(part.path, own))


def _within(path: str, done: list[str]) -> bool:
    return any(path == outer or path.startswith((f"{outer}[", f"{outer}.")) for outer in done)


def _parent(path: str, own: dict[str, Part]) -> PartKind | None:
    """Return the kind of the innermost part that contains `path`."""
    outer = [p for p in own if path.startswith((f"{p}[", f"{p}."))]
    return own[max(outer, key=len)].kind if outer else None
