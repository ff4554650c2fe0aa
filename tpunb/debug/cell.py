"""`%%tpu_debug`: the cell in the kernel, on one core."""

from __future__ import annotations
import __future__

import ast
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb import spmd
from tpunb.debug.places import files, remember
from tpunb.debug.postmortem import open_debugger
from tpunb.debug.profile import tracing
from tpunb.debug.report import Report
from tpunb.debug.watching import StepsDone, watching
from tpunb.errors import ConversionError, MissingPackageError

_spmd = False
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag

# torch makes its queues at the first backward pass of a process, one for each device known
# then (torch 2.9; see tpunb.worker.autograd, which prevents it in ranks).
_QUEUES = "device_ready_queues_"
_BACKWARD_BEFORE_XLA = (
    "%%tpu_debug: a backward pass on the CPU ran in this kernel before its XLA device was used; "
    "torch cannot go backward on XLA any more. Restart the kernel and use the XLA device first: "
    "torch_xla.device() in a cell tagged tpu-skip. Runs of %%tpu_train are not affected."
)


def switched_spmd_on() -> bool:
    """Whether a %%tpu_debug cell has called `xr.use_spmd()`: later runs have nothing of it."""
    return _spmd


@dataclass(frozen=True)
class Wanted:
    """The options of `%%tpu_debug`."""

    report: Callable[[Report], None] | None = None
    """Shows the report; None: there shall be none."""
    steps: int | None = None
    """Stop after so many steps of the training loop."""
    nan: bool = False
    """Look for the first number that is not finite."""
    pdb: bool = False
    """Open the debugger where an exception was raised."""
    profile: Path | None = None
    """Write a trace of xprof's into this folder."""


def run_cell(shell: InteractiveShell, cell: str, wanted: Wanted | None = None) -> Any:
    """Run a cell's source in the notebook's namespace, with launchers calling their function here.

    The value of a last expression is returned. An exception shows the notebook's lines and the
    libraries', counted from the cell's first, which is the magic's. Raises ConversionError for
    what is not Python.
    """
    try:
        from tpunb.worker import launchers, libraries
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torch_xla"):
            raise
        raise MissingPackageError(
            error.name, "%%tpu_debug", "`pip install 'tpunb[xla]'` brings a matching pair"
        ) from error
    global _spmd
    wanted = wanted or Wanted()
    body, last = _compile(shell, cell)
    before = spmd.is_on(os.environ)
    no_tpu = os.environ.get("PJRT_DEVICE") == "CPU"
    counting = libraries.counting_cores(1) if no_tpu else contextlib.nullcontext()
    try:
        traced = tracing(wanted.profile) if wanted.profile else contextlib.nullcontext()
        with (
            traced,
            _reporting(shell, wanted),
            launchers.calling_here(0),
            counting,
            _no_crash(no_tpu),
        ):
            exec(body, shell.user_ns)
            return None if last is None else eval(last, shell.user_ns)
    except StepsDone:
        return None
    except BaseException as error:
        if wanted.pdb and isinstance(error, Exception):
            open_debugger(shell, error, files(shell))
        _show_without_us(shell, error, body.co_filename)
        if _QUEUES in str(error):
            print(_BACKWARD_BEFORE_XLA, file=sys.stderr)
        raise
    finally:
        _spmd = _spmd or (spmd.is_on(os.environ) and not before)


@contextlib.contextmanager
def _reporting(shell: InteractiveShell, wanted: Wanted) -> Iterator[None]:
    """A block after which, however it ends, the report is shown that was asked for."""
    if wanted.report is None and wanted.steps is None:
        yield
        return
    report: Callable[[], Report | None] | None = None
    good = False
    try:
        with watching(shell, steps=wanted.steps, nan=wanted.nan) as report:
            yield
        good = True
    except StepsDone:
        print(f"stopped after {wanted.steps} step{'s' if wanted.steps != 1 else ''} (--steps)")
        good = True
        raise
    finally:
        made = report() if report is not None and wanted.report is not None else None
        if made is not None and wanted.report is not None and (good or made.findings):
            wanted.report(made)


def _no_crash(no_tpu: bool) -> contextlib.AbstractContextManager[None]:
    """A block in which SPMD that is switched on too late is an error, not the kernel's end."""
    if no_tpu and "torch_xla" in sys.modules:
        from tpunb.worker.spmd import prepared

        return prepared()
    return contextlib.nullcontext()


def _compile(shell: InteractiveShell, cell: str) -> tuple[CodeType, CodeType | None]:
    """The cell's statements, and its last expression apart if it ends with one."""
    number = shell.displayhook.prompt_count  # this cell's, in every IPython (see History)
    empty = len(cell) - len(cell.lstrip())  # IPython drops empty lines at the top
    body = "\n" * cell.count("\n", 0, empty) + shell.transform_cell(cell)
    name = shell.compile.cache(f"%%tpu_debug\n{body}", number, raw_code=cell)
    remember(name, number)
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
        raise ConversionError(f"invalid syntax: {error.msg}", number, line, text) from None


def _show_without_us(shell: InteractiveShell, error: BaseException, filename: str) -> None:
    """Have IPython show an exception without the frames of this package and of IPython's own.

    It asks exceptions for `_render_traceback_` (7.34 to 9.18). `%tb` does so too; `%debug`
    sees all frames.
    """
    here = str(Path(__file__).parents[1])
    frames: list[TracebackType] = []
    tb = error.__traceback__
    while tb is not None:
        if frames or tb.tb_frame.f_code.co_filename == filename:
            frames.append(tb)
        tb = tb.tb_next
    shown = None
    for frame in reversed(frames):
        if not frame.tb_frame.f_code.co_filename.startswith(here):
            shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    if shown is None or hasattr(type(error), "_render_traceback_"):
        return

    def render() -> list[str]:
        lines: list[str] = shell.InteractiveTB.structured_traceback(
            type(error), error, shown, tb_offset=0
        )
        return lines

    error.__dict__["_render_traceback_"] = render  # also where the class forbids attributes
