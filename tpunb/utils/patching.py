"""Replaces names in modules, now or as soon as a module is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Replacements:
    """Replaced names, from `begin` to `end`. Each function gets its module after its import."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions
        self._finder = _AfterImport(functions)
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        for name, function in self._functions.items():
            if name in sys.modules:
                function(sys.modules[name])
        sys.meta_path.insert(0, self._finder)

    def end(self) -> None:
        """Restore all names, the last one first."""
        sys.meta_path.remove(self._finder)
        while self._undo:
            self._undo.pop()()

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set a name of a module, class or function until the end."""
        if name in vars(owner):
            before = vars(owner)[name]
            self.at_end(lambda: setattr(owner, name, before))
        else:
            self.at_end(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call `undo` at the end, for a change that `set` cannot make."""
        self._undo.append(undo)


class _AfterImport(MetaPathFinder):
    """Calls a function with a module right after its import."""

    def __init__(self, functions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._functions:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                self._call_after(spec)
                return spec
        return None

    def _call_after(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                self._functions[spec.name](module)

        loader.exec_module = exec_module
