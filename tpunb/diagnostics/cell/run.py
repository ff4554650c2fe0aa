"""`%%tpu_debug`: runs a cell in the kernel on one core, and records what its backend does."""

from __future__ import annotations
import __future__

import ast
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.backends import launchers
from tpunb.backends.xla import spmd
from tpunb.diagnostics.cell.frames import StepsDone
from tpunb.diagnostics.cell.places import Places, remember_cell
from tpunb.diagnostics.cell.report import DebugReport
from tpunb.notebook.errors import ConversionError
from tpunb.runs import directory, ownership
from tpunb.runs.spec import BackendName
from tpunb.utils.errors import MissingPackageError
from tpunb.utils.install_commands import INSTALL_XLA
from tpunb.utils.patching import Replacements

_REHEARSAL = "tpunb.backends.torchtpu.rehearsal"
_spmd = False
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag

# torch creates its queues at the first backward pass of a process, one per device known then
# (torch 2.9; tpunb.backends.xla.runtime prevents the problem in ranks).
_QUEUES = "device_ready_queues_"
_BACKWARD_BEFORE_XLA = (
    "%%tpu_debug: a backward pass on the CPU ran in this kernel before its XLA device was used, "
    "so torch can no longer run one on XLA. Restart the kernel and use the XLA device first: "
    "torch_xla.device() in a cell tagged tpu-skip. Runs of %%tpu_train are not affected."
)


def switched_spmd_on() -> bool:
    """True if a %%tpu_debug cell has called `xr.use_spmd()`, which does not affect later runs."""
    return _spmd


@dataclass(frozen=True)
class DebugSettings:
    report: Callable[[DebugReport], object] | None = None
    """Shows the report; None for no report."""
    steps: int | None = None
    """Stop after this many steps of the training loop."""
    nan: bool = False
    """Find the first value that is not finite."""
    profile: Path | None = None
    """Write an xprof trace of torch_xla into this folder."""
    backend: BackendName = "xla"
    """What the cell is written for."""


def run_cell(shell: InteractiveShell, cell: str, options: DebugSettings | None = None) -> Any:
    """Run a cell's source in the notebook's namespace; launchers call their function in the kernel.

    Returns the value of the last expression. Tracebacks show the lines of the notebook and of
    libraries; line 1 is the line of the magic. Raises ConversionError for invalid syntax.
    """
    options = options or DebugSettings()
    surroundings = _of_xla() if options.backend == "xla" else _of_torch(options.backend)
    body, last = _compile(shell, cell)
    try:
        traced = tracing(options.profile) if options.profile else contextlib.nullcontext()
        with traced, _reporting(shell, options), launchers.calling_here(0), surroundings:
            exec(body, shell.user_ns)
            return None if last is None else eval(last, shell.user_ns)
    except StepsDone:
        return None
    except BaseException as error:
        _show_without_us(shell, error, body.co_filename)
        if _QUEUES in str(error) and options.backend == "xla":
            print(_BACKWARD_BEFORE_XLA, file=sys.stderr)
        raise


def _of_xla() -> contextlib.AbstractContextManager[None]:
    """What surrounds a cell that uses torch_xla. Raises MissingPackageError without it."""
    try:
        from tpunb.backends.xla import tpu_answers
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torch_xla"):
            raise
        raise MissingPackageError(
            error.name, "%%tpu_debug", f"`{INSTALL_XLA}` installs a matching pair"
        ) from error

    @contextlib.contextmanager
    def surrounding() -> Iterator[None]:
        global _spmd
        before = spmd.is_on(os.environ)
        no_tpu = os.environ.get("PJRT_DEVICE") == "CPU"
        answers = tpu_answers.answering_as_tpu(1) if no_tpu else contextlib.nullcontext()
        try:
            with answers, _no_crash(no_tpu):
                yield
        finally:
            _spmd = _spmd or (spmd.is_on(os.environ) and not before)

    return surrounding()


@contextlib.contextmanager
def _of_torch(backend: BackendName) -> Iterator[None]:
    """What surrounds a cell of another backend: it is the only rank of torch.distributed."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    missing = {name: value for name, value in alone.items() if name not in os.environ}
    os.environ.update(missing)
    names = Replacements({"torch": _rehearse_groups} if backend == "torchtpu" else {})
    names.begin()
    had_group = _has_group()
    try:
        yield
    finally:
        names.end()
        for name in missing:
            os.environ.pop(name, None)
        if _has_group() and not had_group:
            sys.modules["torch.distributed"].destroy_process_group()


def _rehearse_groups(torch: ModuleType) -> None:
    """Give the rehearsed TPU its process groups; torch_tpu has its own."""
    if importlib.import_module(f"{_REHEARSAL}.rehearsed_device").is_installed():
        importlib.import_module(f"{_REHEARSAL}.tpu_dist").install_process_groups()


def _has_group() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _reporting(shell: InteractiveShell, options: DebugSettings) -> Iterator[None]:
    """Context in which the cell is recorded; shows the requested report at its end, also after an
    exception.
    """
    if options.report is None and options.steps is None:
        yield
        return
    report: Callable[[], DebugReport | None] | None = None
    good = False
    try:
        with watching(
            shell, steps=options.steps, nan=options.nan, backend=options.backend
        ) as report:
            yield
        good = True
    except StepsDone:
        print(f"stopped after {options.steps} step{'s' if options.steps != 1 else ''} (--steps)")
        good = True
        raise
    finally:
        result = report() if report is not None and options.report is not None else None
        if result is not None and options.report is not None and (good or result.findings):
            options.report(result)


def _no_crash(no_tpu: bool) -> contextlib.AbstractContextManager[None]:
    """Context in which a late `xr.use_spmd()` raises instead of crashing the kernel."""
    if no_tpu and "torch_xla" in sys.modules:
        return spmd.spmd_prepared()
    return contextlib.nullcontext()


def _compile(shell: InteractiveShell, cell: str) -> tuple[CodeType, CodeType | None]:
    """Compile the cell's statements, and separately its last expression if it ends with one."""
    number = shell.displayhook.prompt_count  # this cell's, in every IPython (see History)
    empty = len(cell) - len(cell.lstrip())  # IPython drops empty lines at the top
    body = "\n" * cell.count("\n", 0, empty) + shell.transform_cell(cell)
    name = shell.compile.cache(f"%%tpu_debug\n{body}", number, raw_code=cell)
    remember_cell(name, number)
    flags = shell.compile.flags & _FUTURE  # the notebook's own __future__ imports
    value = None
    try:
        tree = compile(f"\n{body}", name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not cell.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
            value = compile(last, name, "eval", flags, dont_inherit=True)
        return compile(tree, name, "exec", flags, dont_inherit=True), value
    except SyntaxError as error:
        line = error.lineno or 1
        text = (["", *body.split("\n")][line - 1 : line] or [""])[0]
        raise ConversionError(f"it is not Python: {error.msg}", number, line, text) from None


def _show_without_us(shell: InteractiveShell, error: BaseException, filename: str) -> None:
    """Make IPython show an exception without the frames of this package and of IPython.

    IPython calls the exception's `_render_traceback_` (7.34 to 9.18), also for `%tb`. `%debug`
    shows all frames.
    """
    here = str(Path(__file__).parents[2])
    frames = list(dropwhile(lambda frame: _file(frame) != filename, _frames(error)))
    shown = _joined(frame for frame in frames if not _file(frame).startswith(here))
    if shown is None or hasattr(type(error), "_render_traceback_"):
        return

    def render() -> list[str]:
        lines: list[str] = shell.InteractiveTB.structured_traceback(
            type(error), error, shown, tb_offset=0
        )
        return lines

    error.__dict__["_render_traceback_"] = render  # also where the class forbids attributes


def _frames(error: BaseException) -> Iterator[TracebackType]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _joined(frames: Iterable[TracebackType]) -> TracebackType | None:
    joined = None
    for frame in reversed(list(frames)):
        joined = TracebackType(joined, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return joined


@contextlib.contextmanager
def watching(
    shell: InteractiveShell,
    *,
    steps: int | None = None,
    nan: bool = False,
    backend: BackendName = "xla",
) -> Iterator[Callable[[], DebugReport | None]]:
    """Context in which the cell is recorded. Yields a function that returns the report afterwards.

    Recording starts when torch_xla, or for other backends torch, is imported, possibly by the cell
    itself.
    """
    places = Places(shell)
    stack = contextlib.ExitStack()
    reports: list[Callable[[], DebugReport | None]] = []

    def begin(module: ModuleType) -> None:
        if reports:
            return
        # Imported late, because these modules need torch, which is imported by now.
        if backend == "xla":
            from tpunb.diagnostics.cell import watch_xla

            reports.append(
                watch_xla.watch(places, shell.user_ns, names, stack, steps=steps, nan=nan)
            )
        else:
            from tpunb.diagnostics.cell import watch_torch

            on_tpu = backend == "torchtpu"
            reports.append(
                watch_torch.watch(places, shell.user_ns, stack, on_tpu=on_tpu, steps=steps, nan=nan)
            )

    names = Replacements({"torch_xla" if backend == "xla" else "torch": begin})
    names.begin()
    stack.callback(names.end)
    with stack:
        yield lambda: reports[0]() if reports else None


def new_profile_folder(runs: Path) -> Path:
    """Path of a new folder for a trace, next to those of runs: 'runs/profile-20260131-120000'."""
    return runs / time.strftime("profile-%Y%m%d-%H%M%S")


@contextlib.contextmanager
def tracing(folder: Path) -> Iterator[None]:
    """Context that is traced into a folder (`--profile`); prints how to open the trace."""
    profiler = importlib.import_module("torch_xla.debug.profiler")
    directory.make_runs(folder.parent)
    folder.mkdir(0o700, exist_ok=True)
    ownership.require_own(folder)
    profiler.start_trace(str(folder))
    try:
        yield
    finally:
        profiler.stop_trace()
        print(f"trace: {folder}; to open it: pip install xprof, then xprof --logdir {folder}")
