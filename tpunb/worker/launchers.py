"""`torch_xla.launch`, `xmp.spawn` and accelerate's `notebook_launcher` call their function here.

In a rank the processes exist already, and in the kernel there shall be none: so the three call
the function in this process, on this core. Imports neither library; what is not imported yet
is changed when it is. The names that are replaced are in `xla_patches`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

_active: list[_Replacement] = []


def install(index: int) -> None:
    """For the rest of this process, launchers call their function with `index`."""
    _Replacement(index).begin()


@contextlib.contextmanager
def calling_here(index: int) -> Iterator[None]:
    """Within the block, launchers call their function with `index`; then they are as before."""
    replacement = _Replacement(index)
    replacement.begin()
    try:
        yield
    finally:
        replacement.end()


def call_here(
    function: Callable[..., object], args: Sequence[object], num_processes: int | None
) -> None:
    """What `notebook_launcher` does now: like itself with one process."""
    _active[-1].note("num_processes", num_processes)
    _call(function, *args)


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call a launched function. The process group that it leaves would end with its process."""
    before = _has_process_group()
    result = function(*args, **kwargs)
    if not before and _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
    return result


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


class _Replacement:
    """The launchers of all libraries, those that are imported now and those that come."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._undo: list[Callable[[], None]] = []
        self._noted: set[str] = set()
        self._modules: dict[str, Callable[[ModuleType], None]] = {
            "torch_xla._internal.pjrt": self._replace_spawn,
            "torch_xla.torch_xla": self._replace_launch,
            "accelerate.launchers": self._replace_notebook_launcher,
        }
        self._finder = _AfterImport(self._modules)

    def begin(self) -> None:
        _active.append(self)
        for name, replace in self._modules.items():
            if name in sys.modules:
                replace(sys.modules[name])
        sys.meta_path.insert(0, self._finder)

    def end(self) -> None:
        sys.meta_path.remove(self._finder)
        while self._undo:
            self._undo.pop()()
        _active.remove(self)

    def note(self, name: str, asked: int | None) -> None:
        """One line, once, where another number of processes was asked for than there is."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if asked is None or asked == ranks or os.environ.get("RANK", "0") != "0":
            return
        note = f"{name}={asked} is ignored: {ranks} rank{'s run' if ranks > 1 else ' runs'}"
        if note not in self._noted:
            self._noted.add(note)
            print(note, flush=True)

    def _set(self, module: ModuleType, name: str, value: object) -> None:
        before = getattr(module, name)
        setattr(module, name, value)
        self._undo.append(lambda: setattr(module, name, before))

    def _replace_spawn(self, pjrt: ModuleType) -> None:
        """`xmp.spawn` and `torch_xla.launch` end in these, however they were imported."""

        def spawn(
            fn: Callable[..., object],
            nprocs: int | None = None,
            start_method: str = "spawn",
            args: Sequence[object] = (),
        ) -> None:
            self.note("nprocs", nprocs)
            _call(fn, self._index, *args)

        def run_multiprocess(
            fn: Callable[..., object], *args: object, start_method: str = "spawn", **kwargs: object
        ) -> dict[int, object]:
            return {self._index: _call(fn, *args, **kwargs)}

        self._set(pjrt, "spawn", spawn)
        self._set(pjrt, "run_multiprocess", run_multiprocess)

    def _replace_launch(self, torch_xla: ModuleType) -> None:
        """`launch` calls `xmp.spawn`, except where it sees torch elastic above."""
        self._set(torch_xla, "dist", _WithoutElastic(torch_xla.dist))

    def _replace_notebook_launcher(self, launchers: ModuleType) -> None:
        """Its code is replaced: `accelerate` and the user hold the function itself."""
        original: FunctionType = launchers.notebook_launcher
        before = original.__code__, original.__defaults__

        def undo() -> None:
            original.__code__, original.__defaults__ = before

        self._undo.append(undo)
        original.__code__ = _notebook_launcher.__code__
        original.__defaults__ = _notebook_launcher.__defaults__


def _notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    *others: object,
    **options: object,
) -> None:
    # Runs as the code of accelerate's function, with the globals of accelerate's module.
    from tpunb.worker import launchers

    launchers.call_here(function, args, num_processes)


class _WithoutElastic:
    """`torch.distributed`, as `torch_xla.launch` shall see it."""

    def __init__(self, dist: ModuleType) -> None:
        self._dist = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def is_torchelastic_launched(self) -> bool:
        return False


class _AfterImport(MetaPathFinder):
    """Calls a function with a module right after the module was imported."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
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
