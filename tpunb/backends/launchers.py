"""Makes the launchers of torch, torch_xla, accelerate and Lightning call their function here.

In a rank the processes exist already, and the kernel must not start any. Imports none of the
libraries; a library that is imported later is changed then. The replaced names are in
`private_names`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any

from tpunb.backends.xla import private_names
from tpunb.utils.patching import Replacements

_active: list[_Replacement] = []
_SPAWN = "torch.multiprocessing.spawn"


def redirect_launchers(index: int, *, spawn: bool = True) -> None:
    """Have launchers call their function with `index`, for the rest of this process.

    `spawn`: also torch.multiprocessing.spawn, which a script that runs alone may need.
    """
    _Replacement(index, spawn).begin()


def are_redirected() -> bool:
    """True if launchers call their function in this process: in a rank, under %%tpu_debug."""
    return bool(_active)


@contextlib.contextmanager
def calling_here(index: int) -> Iterator[None]:
    """A block in which launchers call their function with `index`."""
    replacement = _Replacement(index, spawn=True)
    replacement.begin()
    try:
        yield
    finally:
        replacement.end()


def call_here(
    function: Callable[..., object], args: Sequence[object], num_processes: int | None
) -> None:
    """The replacement of `notebook_launcher`, which behaves as with one process."""
    _active[-1].note("num_processes", num_processes)
    _call(function, *args)


def spawn_here(
    function: Callable[..., object], args: Sequence[object], nprocs: int, join: bool
) -> object:
    """The replacement of `torch.multiprocessing.spawn`.

    Raises ValueError if the function would expect another number of ranks.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if nprocs != world:
        raise ValueError(
            f"torch.multiprocessing.spawn(nprocs={nprocs}) in a run with {world} ranks: run the "
            f"cell with --cores {nprocs}, or pass int(os.environ['WORLD_SIZE'])"
        )
    _call(function, _active[-1].index, *args)
    return None if join else _Joined()


class _Joined:
    """The context that `spawn(join=False)` returns, after the function has ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _call(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Call a launched function, and destroy a process group that it leaves behind."""
    before = _has_process_group()
    result = function(*args, **kwargs)
    if not before and _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()
    return result


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


class _Replacement:
    """The launchers of all libraries, imported now or later."""

    def __init__(self, index: int, spawn: bool) -> None:
        self.index = index
        self._noted: set[str] = set()
        self._names = Replacements(
            {
                "torch_xla._internal.pjrt": self._replace_spawn,
                "torch_xla.torch_xla": self._replace_launch,
                "accelerate.launchers": lambda module: self._replace_code(
                    module.notebook_launcher, _notebook_launcher
                ),
                **({_SPAWN: self._replace_mp_spawn} if spawn else {}),
                **self._lightning(),
            }
        )

    def begin(self) -> None:
        _active.append(self)
        self._names.begin()

    def end(self) -> None:
        self._names.end()
        _active.remove(self)

    def note(self, name: str, requested: int | None) -> None:
        """Print once that a requested number of processes, in all or per host, is ignored."""
        ranks, of_host = (
            int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        )
        if requested in (None, ranks, of_host) or os.environ.get("RANK", "0") != "0":
            return
        note = f"{name}={requested} is ignored: {ranks} rank{'s run' if ranks > 1 else ' runs'}"
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
            _call(fn, self.index, *args)

        def run_multiprocess(
            fn: Callable[..., object], *args: object, start_method: str = "spawn", **kwargs: object
        ) -> dict[int, object]:
            return {self.index: _call(fn, *args, **kwargs)}

        self._names.set(pjrt, "spawn", spawn)
        self._names.set(pjrt, "run_multiprocess", run_multiprocess)

    def _replace_launch(self, torch_xla: ModuleType) -> None:
        """`launch` calls `xmp.spawn`, unless it sees that torch elastic started the process."""
        self._names.set(torch_xla, "dist", _WithoutElastic(torch_xla.dist))

    def _replace_mp_spawn(self, module: ModuleType) -> None:
        self._replace_code(module.spawn, _spawn)

    def _replace_code(self, original: FunctionType, here: Any) -> None:
        """Replace a function's code, because libraries and the user hold the function itself."""
        before = original.__code__, original.__defaults__

        def undo() -> None:
            original.__code__, original.__defaults__ = before

        self._names.at_end(undo)
        original.__code__ = here.__code__
        original.__defaults__ = here.__defaults__

    def _lightning(self) -> dict[str, Callable[[ModuleType], None]]:
        """Make a Trainer and a Fabric know that this process is one of the ranks.

        Replacing `xmp.spawn` is not enough for Lightning: its launcher waits for a result that only
        rank 0 sends, and code outside of it acts as the parent of all ranks, rank 0 of 1.
        """
        replace: dict[str, Callable[[ModuleType], None]] = {}
        for package in (*private_names.TRAINER, *private_names.FABRIC):
            replace[f"{package}.strategies.launchers.xla"] = self._replace_launcher
            replace[f"{package}.strategies.xla"] = self._launch_at_once
            replace[f"{package}.strategies.ddp"] = self._start_no_more
        for fabric in private_names.FABRIC:
            replace[f"{fabric}.strategies.xla_fsdp"] = self._launch_at_once
            replace[f"{fabric}.utilities.rank_zero"] = self._tell_rank
        return replace

    def _replace_launcher(self, launchers: ModuleType) -> None:
        fabric = launchers.__name__.startswith(private_names.FABRIC)

        def launch(
            launcher: object, function: Callable[..., object], *args: object, **kwargs: object
        ) -> object:
            if not fabric:  # whose function may have an argument of that name
                kwargs.pop("trainer", None)
            return _call(function, *args, **kwargs)

        self._names.set(launchers._XLALauncher, "launch", launch)

    def _start_no_more(self, strategies: ModuleType) -> None:
        """Where torchrun's variables are, strategy="ddp_notebook" starts as "ddp" does: nothing."""
        configure = strategies.DDPStrategy._configure_launcher

        def configure_launcher(strategy: Any) -> None:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                strategy._start_method = "popen"
            configure(strategy)

        self._names.set(strategies.DDPStrategy, "_configure_launcher", configure_launcher)

    def _launch_at_once(self, strategies: ModuleType) -> None:
        """Make a strategy know its rank from the beginning, and after a fit as well."""
        for name in ("XLAStrategy", "XLAFSDPStrategy"):
            if strategy := vars(strategies).get(name):
                always = property(lambda self: True, lambda self, value: None)
                self._names.set(strategy, "_launched", always)

    def _tell_rank(self, rank_zero: ModuleType) -> None:
        """Set the rank, which was read from the environment at import, maybe in the prelude."""
        self._names.set(rank_zero.rank_zero_only, "rank", self.index)


def _notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    *others: object,
    **options: object,
) -> None:
    # Runs as the code of accelerate's function, with the globals of accelerate's module.
    from tpunb.backends import launchers

    launchers.call_here(function, args, num_processes)


def _spawn(
    fn: Callable[..., object],
    args: Sequence[object] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> object:
    # Like _notebook_launcher.
    from tpunb.backends import launchers

    return launchers.spawn_here(fn, args, nprocs, join)


class _WithoutElastic:
    """`torch.distributed` for `torch_xla.launch`, without a sign of torch elastic."""

    def __init__(self, dist: ModuleType) -> None:
        self._dist = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def is_torchelastic_launched(self) -> bool:
        return False
