"""What the person has changed in the kernel since the cells above the train cell made it.

After each cell, all variables are marked (`tpunb.kernel.marks`), so it is known which execution
changed which of them, and from which values: that is an `Effect`. When a run begins, the effects
of the cells above the train cell are put together in the order in which the run executes them.
A variable for which this gives another version than the kernel has was changed by the person: by
a cell below, by a cell that was executed twice, in another order, or before a cell above it was
changed. What is merely different in each process, such as a random number, has the same version.

Environment variables and torch's global settings are tracked like variables.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tpunb.kernel.marks import ValueMark, mark
from tpunb.kernel.settings import Part, is_of_ipython, parts_of
from tpunb.notebook.convert.cells import plain_python
from tpunb.notebook.convert.magics import NotPythonError
from tpunb.notebook.convert.missing_changes import changed_names
from tpunb.utils.modules import is_local_file, loaded, own_classes
from tpunb.utils.names_read import names_read, names_set_by_functions, names_stored

_MOST_EFFECTS = 20
"""Executions of one text that are remembered."""
_VARIABLES, _TORCH = "os.environ[", "torch."
"""The beginnings of the names of environment variables and of torch's settings."""
TORCH_SETTERS = {
    "get_default_dtype": "set_default_dtype",
    "is_grad_enabled": "set_grad_enabled",
    "are_deterministic_algorithms_enabled": "use_deterministic_algorithms",
}
_IN_A_NEW_PROCESS = {
    "is_grad_enabled": True,
    "are_deterministic_algorithms_enabled": False,
}
"""And torch.float32 is the default dtype."""
_MANAGED = frozenset(("PJRT_DEVICE", "XLA_USE_SPMD"))
"""Environment variables that tpunb itself changes in the kernel and sets in each run."""


@dataclass(frozen=True)
class Version:
    """How a value came to be: equal versions are what the same cells make from the same values."""

    token: str
    cell: int | None = None
    """The execution that made it; None: before tpunb was loaded, or outside of a cell."""
    content: bytes | None = None
    """The mark of a value whose mark is exact."""
    identity: int = 0
    parts: tuple[Part, ...] = field(default=(), repr=False)
    """The value's settings; empty if they are not known."""
    because: tuple[str, ...] = ()
    """For a version that no execution has made yet: names whose values would be others."""
    gone: bool = False
    """True if the name does not exist."""
    classes: frozenset[int] = frozenset()
    """The identities of the user's classes that the value is an object of."""

    def same(self, other: Version) -> bool:
        """True if both versions are of equal values, or of what differs in each process only."""
        if self.gone or other.gone:
            return self.gone and other.gone
        equal = self.content is not None and self.content == other.content
        return equal or self.token == other.token


_NOTHING = Version("", gone=True)
Versions = dict[str, Version]
_Changed = dict[str, tuple[object, ValueMark]]
"""Values that have changed, and their marks."""


@dataclass(frozen=True)
class Effect:
    """What one execution of a cell did."""

    reads: Mapping[str, Version]
    made: Mapping[str, Version]
    before: Mapping[str, Version]
    """The earlier versions of what it changed in place, maybe under another name."""
    failed: bool = False


@dataclass(frozen=True)
class PreludeCell:
    """A cell that a run executes above the train cell."""

    source: str
    number: int | None
    """Its number as shown to users."""
    returned: Mapping[str, str] = field(default_factory=dict)
    """For a train cell: the names that its runs returned to the kernel, each with the run."""
    current: frozenset[str] = frozenset()
    """Names that the run gets as the kernel has them now: a call of `tpunb.launch` made them."""
    lacks: frozenset[str] = frozenset()
    """Names that the cell assigns in the kernel, but not in the run."""


@dataclass(frozen=True)
class ChangedVariable:
    """A variable whose value in the kernel is not the one that a run's cells make."""

    name: str
    kernel: Version
    run: Version | None
    """None: no cell of the run makes it."""
    alias: str | None = None
    """Another variable that is the same object, and that the run makes as the kernel has it."""

    @property
    def in_place(self) -> bool:
        """True if the kernel's value is still the object that the cells made."""
        return self.run is not None and self.run.identity == self.kernel.identity != 0


class Changes:
    """Follows the variables of one kernel."""

    def __init__(self, user_ns: dict[Any, Any], earlier: Iterable[str] = ()) -> None:
        """Begin with the variables as they are. `earlier`: the texts of the cells so far."""
        self._user_ns = user_ns
        self._effects: dict[str, list[Effect]] = {}
        self._versions: Versions = {}
        state = self._state()
        self._marks = {name: mark(value) for name, value in state.items()}
        self._loaded = 0
        self._own: list[str] = []
        """The user's modules."""
        self._specs: dict[str, object] = {}
        self._files: dict[str, tuple[int, int]] = {}
        first = {
            name: _version(name, value, "the beginning", None, self._marks[name])
            for name, value in state.items()
        }
        for source in earlier:
            names = changed_names(source) & self._marks.keys()
            made = {name: (state[name], self._marks[name]) for name in names}
            self._add(source, None, made, failed=False)
        self._versions = {**first, **self._versions}
        self._note_modules()

    # What happens in the kernel

    def cell_ended(self, source: str, number: int | None, *, failed: bool) -> None:
        changed, gone = self._changed()
        self._marks |= {name: new for name, (_, new) in changed.items()}
        for name in gone:
            del self._marks[name]
        self._add(source, number, changed, gone, failed=failed)
        self._note_modules()

    def returned(self, names: Iterable[str], run: str, number: int | None) -> None:
        """Note that a run has returned values to these variables."""
        for name in names:
            value = self._user_ns.get(name)
            self._marks[name] = mark(value)
            token = _returned(name, run)
            self._versions[name] = _version(name, value, token, number, self._marks[name])

    # What a run gets

    def since(
        self, prelude: Iterable[PreludeCell], names: Iterable[str], running: int | None
    ) -> Iterator[ChangedVariable]:
        """Yield the changes of variables and settings that a run with these cells does not make.

        `names`: what the train cell reads. `running`: the number of the running cell.
        """
        now = self._now(running)
        run = self._run(prelude, now)
        # The ranks' environment is the kernel's, until a cell of the run changes it.
        settings = {name: run[name] for name in run if name.startswith(_VARIABLES)}
        settings |= {
            name: run[name] if name in run and run[name].content else _setting_at_first(name)
            for name in now
            if name.startswith(_TORCH) and not now[name].gone
        }
        for name, there in [*((name, run.get(name)) for name in names), *settings.items()]:
            kernel = now.get(name)
            if kernel is None or (kernel.gone and there is None):
                continue
            if there is None or not kernel.same(there):
                yield ChangedVariable(name, kernel, there, _alias(name, now, run))

    def value(self, name: str) -> object:
        """Return a variable's value, or that of a setting."""
        return self._state()[name]

    def edited_modules(self) -> Iterator[str]:
        """Yield the files of imported modules that were edited since the kernel imported them."""
        for file, edition in self._files.items():
            with suppress(OSError):  # deleted
                if _edition(file) != edition:
                    yield file

    # Versions

    def _state(self) -> dict[str, Any]:
        """Return the user's variables, the environment and torch's settings, by name."""
        found = {
            name: value
            for name, value in list(self._user_ns.items())
            if isinstance(name, str) and name.isidentifier() and not is_of_ipython(name)
        }
        found |= {
            f"{_VARIABLES}{name!r}]": value
            for name, value in list(os.environ.items())
            if name not in _MANAGED
        }
        return found | dict(_torch_settings())

    def _changed(self) -> tuple[_Changed, set[str]]:
        """Return what has another mark than after the last cell, and the names that are gone."""
        # Read once: other threads of the notebook may change variables at any time.
        state = self._state()
        marks = {name: mark(value) for name, value in state.items()}
        changed = {
            name: (state[name], new) for name, new in marks.items() if self._marks.get(name) != new
        }
        return changed, self._marks.keys() - marks.keys()

    def _add(
        self,
        source: str,
        number: int | None,
        changed: _Changed,
        gone: Iterable[str] = (),
        *,
        failed: bool,
    ) -> None:
        before = self._versions
        reads = {
            name: before.get(name, _NOTHING) for name in names_read(_tree(source), self._user_ns)
        }
        token = _token(source, reads, f"{number}" if failed else "")
        made = {
            name: _version(name, value, f"{name} of {token}", number, new)
            for name, (value, new) in changed.items()
        }
        made |= dict.fromkeys(gone, _NOTHING)
        self._versions = {**before, **made}
        # A name may be bound to a value that it had before.
        same = {
            name: self._versions[name]
            for name in names_stored(_tree(source))
            if name in self._versions and name not in made
        }
        in_place = {
            name: before[name]
            for name, version in made.items()
            if name in before and before[name].identity == version.identity != 0
        }
        effects = self._effects.setdefault(source, [])
        effects.append(Effect(reads, made | same, in_place, failed))
        del effects[:-_MOST_EFFECTS]

    def _now(self, running: int | None) -> Versions:
        """Return the versions at this moment, in the middle of a cell."""
        changed, gone = self._changed()
        now = {
            name: _version(name, value, f"{name} in {running}", running, new)
            for name, (value, new) in changed.items()
        }
        return {**self._versions, **now, **dict.fromkeys(gone, _NOTHING)}

    def _run(self, prelude: Iterable[PreludeCell], now: Versions) -> Versions:
        """Return the versions that the cells of a run make, starting in a new process."""
        run: Versions = {}
        for cell in prelude:
            made = self._made_by(cell, run)
            run |= {name: made[name] for name in made if name not in cell.lacks}
            run |= {
                name: Version(_returned(name, of), cell.number)
                for name, of in cell.returned.items()
            }
            run |= {name: now[name] for name in cell.current if name in now}
        return run

    def _made_by(self, cell: PreludeCell, run: Versions) -> Versions:
        effects = self._effects.get(cell.source, [])
        if cell.returned:
            return {}
        for effect in reversed(effects):
            if not effect.failed and not _others(effect.reads, run):
                return {**effect.made, **_unknown(_others(effect.before, run), run, cell)}
        tree = _tree(cell.source)
        names = changed_names(cell.source).union(
            names_stored(tree),
            names_set_by_functions(tree, self._user_ns),
            *(effect.made for effect in effects),
        )
        others = _others(effects[-1].reads, run) if effects else ()
        return _unknown(names, run, cell, because=tuple(others))

    def _note_modules(self) -> None:
        """Remember the files of the user's modules as they were imported, or reloaded."""
        loaded_now = len(sys.modules)
        new = loaded_now != self._loaded
        self._loaded = loaded_now
        for name in list(sys.modules if new else self._own):
            module = sys.modules.get(name)
            spec = getattr(module, "__spec__", None)
            if name in self._specs and self._specs[name] is spec:
                continue
            self._specs[name] = spec
            file = getattr(module, "__file__", None)
            if name != "__main__" and isinstance(file, str) and is_local_file(file):
                if name not in self._own:
                    self._own.append(name)
                with suppress(OSError):  # in a zip file, or deleted
                    self._files[file] = _edition(file)


def _version(name: str, value: object, token: str, cell: int | None, new: ValueMark) -> Version:
    content = new.hash if new.exact else None
    classes = frozenset(map(id, own_classes(value)))
    return Version(token, cell, content, new.identity, parts_of(name, value), classes=classes)


def _edition(file: str) -> tuple[int, int]:
    status = os.stat(file)
    return status.st_mtime_ns, status.st_size


def _alias(name: str, now: Versions, run: Versions) -> str | None:
    """Return another name of the kernel's object that the run has, too."""
    mine = now[name].identity
    same = (
        other
        for other in run
        if other != name
        and other.isidentifier()
        and other in now
        and now[other].identity == mine != 0
        and now[other].same(run[other])
    )
    return next(same, None)


def _unknown(
    names: Iterable[str], run: Versions, cell: PreludeCell, because: tuple[str, ...] | None = None
) -> Versions:
    """Return versions, unlike all that the kernel has, of names that a cell of a run changes.

    Also of other names of the same objects, and of objects of a class that is changed.
    """
    names = set(names)
    changed = {run[name].identity for name in names if name in run} - {0}
    found = names | {
        name
        for name, version in run.items()
        if version.identity in changed or not changed.isdisjoint(version.classes)
    }
    return {
        name: Version(
            f"{name} of the run", cell.number, because=(name,) if because is None else because
        )
        for name in found
    }


def _others(read: Mapping[str, Version], run: Versions) -> list[str]:
    """Return the names of which a run has another version."""
    return [name for name, version in read.items() if not version.same(run.get(name, _NOTHING))]


def _token(source: str, reads: Mapping[str, Version], more: str) -> str:
    parts = [source, more, *(f"{name}={read.token}" for name, read in sorted(reads.items()))]
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _returned(name: str, run: str) -> str:
    return f"{name} returned by {run}"


def _tree(source: str) -> ast.Module:
    """Return the code of a cell, without its magics."""
    lines = source.split("\n")
    try:
        plain = plain_python("\n".join("" if x.startswith("%%tpu_") else x for x in lines))
        return ast.parse("\n".join(plain.lines))
    except (NotPythonError, SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.Module([], [])


def _torch_settings() -> Iterator[tuple[str, object]]:
    for name in TORCH_SETTERS:
        if (read := loaded("torch", name)) is not None:
            # Another thread may be in the middle of importing torch.
            with suppress(RuntimeError):
                yield f"{_TORCH}{name}()", read()


def _setting_at_first(name: str) -> Version:
    """Return the version of a setting of torch in a new process."""
    value = _IN_A_NEW_PROCESS.get(name.removeprefix(_TORCH).removesuffix("()"))
    first = mark(loaded("torch", "float32") if value is None else value)
    return Version("a new process", content=first.hash)
