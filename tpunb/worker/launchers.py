"""Launchers call their function here: those of torch_xla, accelerate and Lightning.

In a rank the processes exist already, and in the kernel there shall be none: so the launchers call
the function in this process, on this core. Imports none of the libraries; what is not imported
yet is changed when it is. The names that are replaced are in `xla_patches`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from tpunb.worker import xla_patches
from tpunb.worker.replacing import Replacements

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
        self._noted: set[str] = set()
        self._names = Replacements(
            {
                "torch_xla._internal.pjrt": self._replace_spawn,
                "torch_xla.torch_xla": self._replace_launch,
                "accelerate.launchers": self._replace_notebook_launcher,
                **self._lightning(),
            }
        )

    def begin(self) -> None:
        _active.append(self)
        self._names.begin()

    def end(self) -> None:
        self._names.end()
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

        self._names.set(pjrt, "spawn", spawn)
        self._names.set(pjrt, "run_multiprocess", run_multiprocess)

    def _replace_launch(self, torch_xla: ModuleType) -> None:
        """`launch` calls `xmp.spawn`, except where it sees torch elastic above."""
        self._names.set(torch_xla, "dist", _WithoutElastic(torch_xla.dist))

    def _replace_notebook_launcher(self, launchers: ModuleType) -> None:
        """Its code is replaced: `accelerate` and the user hold the function itself."""
        original: FunctionType = launchers.notebook_launcher
        before = original.__code__, original.__defaults__

        def undo() -> None:
            original.__code__, original.__defaults__ = before

        self._names.at_end(undo)
        original.__code__ = _notebook_launcher.__code__
        original.__defaults__ = _notebook_launcher.__defaults__

    def _lightning(self) -> dict[str, Callable[[ModuleType], None]]:
        """All that a Trainer and a Fabric need to know: this is one of the ranks, always.

        With its own launcher, `xmp.spawn` calling here is not enough: the launcher waits for
        what only rank 0 sends, and what is outside of it takes itself for the parent of all
        ranks: rank 0 of 1, everywhere.
        """
        replace: dict[str, Callable[[ModuleType], None]] = {}
        for trainer, fabric in zip(xla_patches.TRAINER, xla_patches.FABRIC, strict=True):
            replace[f"{trainer}.strategies.launchers.xla"] = self._replace_trainers
            replace[f"{trainer}.strategies.xla"] = self._launch_at_once
            replace[f"{fabric}.strategies.launchers.xla"] = self._replace_fabrics
            replace[f"{fabric}.strategies.xla"] = self._launch_at_once
            replace[f"{fabric}.strategies.xla_fsdp"] = self._launch_at_once
            replace[f"{fabric}.utilities.rank_zero"] = self._tell_rank
        return replace

    def _replace_trainers(self, launchers: ModuleType) -> None:
        def launch(
            launcher: object,
            function: Callable[..., object],
            *args: object,
            trainer: object = None,
            **kwargs: object,
        ) -> object:
            return _call(function, *args, **kwargs)

        self._names.set(launchers._XLALauncher, "launch", launch)

    def _replace_fabrics(self, launchers: ModuleType) -> None:
        def launch(
            launcher: object, function: Callable[..., object], *args: object, **kwargs: object
        ) -> object:
            return _call(function, *args, **kwargs)

        self._names.set(launchers._XLALauncher, "launch", launch)

    def _launch_at_once(self, strategies: ModuleType) -> None:
        """A strategy knows its rank from its first moment, and after a fit as well."""
        for name in ("XLAStrategy", "XLAFSDPStrategy"):
            if strategy := vars(strategies).get(name):
                always = property(lambda self: True, lambda self, value: None)
                self._names.set(strategy, "_launched", always)

    def _tell_rank(self, rank_zero: ModuleType) -> None:
        """It was read from the environment at the import, which may have been in the prelude."""
        self._names.set(rank_zero.rank_zero_only, "rank", self._index)


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
