"""Makes the launchers of torch, torch_xla, accelerate and Lightning call their function here.

In a rank the processes exist already, and the kernel must not start any. Where a rank is one of
several, it refuses to start a launcher as a command (torchrun), and its child processes refuse to
join a process group as another rank. Imports none of the libraries; a library that is imported
later is changed then. The replaced names are in `private_names`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from tpunb.backends.xla import private_names
from tpunb.utils import processes
from tpunb.utils.errors import LaunchError
from tpunb.utils.patching import Replacements

_active: list[_Replacement] = []
_repeating = False
_SPAWN, _ELASTIC = "torch.multiprocessing.spawn", "torch.distributed.launcher.api"
_SHARED = "TORCHELASTIC_USE_AGENT_STORE"
_SHELLS, _TEXT = ("sh", "bash", "dash", "zsh"), ("-c", "-lc", "-ec")
_BEFORE = re.compile(
    r"[;&|()]+|(?:env|exec|nice|nohup|numactl|stdbuf|sudo|taskset|time|timeout|python[\d.]*)|-.*"
    r"|\d+|\w+=.*"
)
"""Words before the program that a command starts, or the module after `python -m`."""
_LAUNCHERS = re.compile(
    r"(torchrun|deepspeed|accelerate-launch|accelerate(?:\.commands\.accelerate_cli)? launch"
    r"|(?:torch\.distributed|accelerate\.commands|deepspeed\.launcher)\.(?:run|launch|runner))\b"
)

Report = Callable[[Exception], None]


def redirect_launchers(index: int, *, spawn: bool = True, report: Report | None = None) -> None:
    """Have launchers call their function with `index`, for the rest of this process.

    `spawn`: also torch.multiprocessing.spawn, which a script that runs alone may need. `report` is
    called in a child process that fails because it would be another rank.
    """
    _Replacement(index, spawn, report).begin()


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """A block in which a child process runs again what its rank has run.

    A process group that the block makes has the rank's numbers and moves no data.
    """
    global _repeating
    _repeating = True
    try:
        yield
    finally:
        _repeating = False


def are_redirected() -> bool:
    """True if launchers call their function in this process: in a rank, under %%tpu_debug."""
    return bool(_active)


@contextlib.contextmanager
def calling_here(index: int) -> Iterator[None]:
    """A block in which launchers call their function with `index`."""
    replacement = _Replacement(index, spawn=True, report=None)
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
    _check_number(nprocs, f"torch.multiprocessing.spawn(nprocs={nprocs})")
    _call(function, _active[-1].index, *args)
    return None if join else _Joined()


def _check_number(requested: int, call: str, most: int | None = None) -> None:
    """Raise ValueError unless a launcher is asked for the ranks that there are."""
    world = _active[-1].world
    if requested <= world <= (requested if most is None else most) and requested:
        return
    pass_ = "pass int(os.environ['WORLD_SIZE'])"
    if requested == 0:
        raise ValueError(
            f"{call} starts no process (torch.cuda.device_count() is 0 without a GPU): {pass_}"
        )
    raise ValueError(
        f"{call} in a run with {world} ranks: run the cell with --cores {requested}, or {pass_}"
    )


def start_group(*args: Any, **options: Any) -> None:
    """The replacement of `init_process_group`.

    Raises LaunchError in a child process that would be another rank than the one it belongs to. A
    child for each rank may form a group: torch's asynchronous checkpoints do.
    """
    rank = _active[-1]
    if _repeating:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        return rank.start("fake", store=FakeStore(), rank=rank.index, world_size=rank.world)
    given = inspect.signature(rank.start).bind(*args, **options).arguments
    if rank.world > 1 and (os.getpid() != rank.process or processes.spawned_by_rank):
        number, size = (
            value if (value := given.get(name, -1)) >= 0 else int(os.environ.get(name.upper(), "1"))
            for name in ("rank", "world_size")
        )
        if size > 1 and (number, size) != (rank.index, rank.world):
            error = LaunchError(
                f"init_process_group as rank {number} of {size}, in a process that rank "
                f"{rank.index} has started: the {rank.world} ranks are processes already. Do not "
                "start others. Call the function in the train cell itself, with "
                "int(os.environ['RANK']) as its rank and int(os.environ['WORLD_SIZE']) as the "
                "number of ranks"
            )
            if rank.report is not None:
                rank.report(error.with_traceback(_stack()))
            raise error.with_traceback(None)
        dist = sys.modules["torch.distributed"]
        if dist.is_initialized() and dist.get_backend() == "fake":
            dist.destroy_process_group()
    # torch elastic serves the store at its own port only: at any other, rank 0 has to.
    place = str(given.get("init_method") or "env://")
    address = os.environ.get("MASTER_PORT", "") if place == "env://" else place
    shared = os.environ.get(_SHARED)
    if shared and place[:4] in ("env:", "tcp:") and str(rank.port) not in address:
        os.environ[_SHARED] = "False"
    try:
        return rank.start(*args, **options)
    finally:
        os.environ.update({_SHARED: shared} if shared else {})


def _stack() -> TracebackType | None:
    """The calls that led here, as the traceback of an error that nothing catches."""
    stack = None
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        stack = TracebackType(stack, frame, frame.f_lasti, line)
    return stack


def _refuse_command(command: Any, shell: bool = False) -> None:
    """Raise LaunchError if a command starts a launcher of ranks, in a rank of several."""
    words = [*map(os.fsdecode, command if isinstance(command, list | tuple) else [command])]
    if not shell and PurePath(words[0]).name in _SHELLS:
        texts = [text for flag, text in itertools.pairwise(words) if flag in _TEXT]
        shell, words = bool(texts), texts or words
    parts = [words]
    if shell:
        lexer = shlex.shlex(words[0].replace("\n", ";"), posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters, parts = True, "", [[]]
        with contextlib.suppress(ValueError):  # the shell will say what is wrong with the rest
            for word in lexer:
                parts += [[]] if {*word} <= {*";&|()"} else []
                parts[-1].append(word)
    for part in parts:
        names = [PurePath(word).name for word in part]
        while names and _BEFORE.fullmatch(names[0]):
            del names[0]
        if found := _LAUNCHERS.match(" ".join(names[:2])):
            raise LaunchError(
                f"{found[1]} would start other processes from each of the {_active[-1].world} "
                "ranks, which are processes already. Call the function that trains in the train "
                "cell itself, or run the command in a cell without %%tpu_train or with --cores 1"
            )


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

    def __init__(self, index: int, spawn: bool, report: Report | None) -> None:
        self.index = index
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.process = os.getpid()
        self.port = os.environ.get("MASTER_PORT")
        self.report = report
        self.start: Callable[..., None]
        """torch's own `init_process_group`."""
        self._noted: set[str] = set()
        of_torch = {_SPAWN: self._replace_mp_spawn, _ELASTIC: self._replace_elastic}
        self._names = Replacements(
            {
                "torch_xla._internal.pjrt": self._replace_spawn,
                "torch_xla.torch_xla": self._replace_launch,
                "accelerate.launchers": lambda module: self._replace_code(
                    module.notebook_launcher, _notebook_launcher
                ),
                "torch.distributed.distributed_c10d": self._replace_init,
                **({"subprocess": self._replace_commands} if self.world > 1 else {}),
                **(of_torch if spawn else {}),
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

    def _replace_elastic(self, module: ModuleType) -> None:
        """`elastic_launch` calls a function here; as a command, its entrypoint is torchrun's."""
        original = module.elastic_launch.__call__

        def call(launch: Any, *args: object) -> object:
            if not callable(launch._entrypoint):
                if self.world > 1:
                    _refuse_command("torchrun")
                return original(launch, *args)
            config = launch._config
            least, most = (n * config.nproc_per_node for n in (config.min_nodes, config.max_nodes))
            _check_number(least, f"elastic_launch of {least} processes", most)
            return {self.index: _call(launch._entrypoint, *args)}

        self._names.set(module.elastic_launch, "__call__", call)

    def _replace_init(self, module: ModuleType) -> None:
        """In the function below its decorators, which all that have imported it hold."""
        function = inspect.unwrap(module.init_process_group)
        self.start = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__
        )
        self._names.set(function, "__signature__", inspect.signature(function))
        self._replace_code(function, _init_process_group)

    def _replace_commands(self, subprocess: ModuleType) -> None:
        popen, system = subprocess.Popen.__init__, os.system

        @functools.wraps(popen)
        def init(process: object, args: Any, *more: Any, **options: Any) -> None:
            _refuse_command(args, options.get("shell", False))
            popen(process, args, *more, **options)

        def in_shell(command: Any) -> int:
            _refuse_command(command, shell=True)
            return system(command)

        self._names.set(subprocess.Popen, "__init__", init)
        self._names.set(os, "system", in_shell)

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


def _init_process_group(*args: Any, **options: Any) -> None:
    # Like _notebook_launcher.
    from tpunb.backends import launchers

    launchers.start_group(*args, **options)


class _WithoutElastic:
    """`torch.distributed` for `torch_xla.launch`, without a sign of torch elastic."""

    def __init__(self, dist: ModuleType) -> None:
        self._dist = dist

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dist, name)

    def is_torchelastic_launched(self) -> bool:
        return False
