"""`%%tpu_debug`: the cell in the kernel, on one core."""

from __future__ import annotations
import __future__

import ast
import contextlib
import os
import sys
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.errors import ConversionError, MissingPackageError
from tpunb.models import Device

_chosen = False
_taken_in: int | None = None
"""The cell in which the kernel's own XLA runtime was started."""
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


def chosen_by_us() -> bool:
    """Whether the kernel's PJRT_DEVICE is tpunb's doing, not the person's."""
    return _chosen


def note_cell(result: Any) -> None:
    """After each cell: remember the first after which the kernel's XLA runtime runs."""
    global _taken_in
    if _taken_in is None and result is not None and _runtime_runs():
        _taken_in = result.execution_count or 0


def taken_in() -> int | None:
    """The number of the cell in which the kernel has taken its XLA device; None if it has not,
    or did before tpunb was loaded.
    """
    return _taken_in or None


def _runtime_runs() -> bool:
    xla = sys.modules.get("torch_xla")
    return xla is not None and bool(xla._XLAC._xla_runtime_is_initialized())


def kernel_device(wanted: Device = "CPU") -> str | None:
    """Choose the kernel's own XLA device, unless the person's PJRT_DEVICE has.

    Chips are exclusive: a kernel that holds the TPU blocks every run, so it is the CPU unless
    the person asks for the TPU. Returns what to tell the person; None if nothing has changed.
    """
    global _chosen
    if os.environ.get("PJRT_DEVICE") and not _chosen:
        return None
    if _runtime_runs():
        return None
    if os.environ.get("PJRT_DEVICE") == wanted:
        return None
    os.environ["PJRT_DEVICE"] = wanted
    _chosen = True
    return f"the kernel's own XLA device is the {wanted} (PJRT_DEVICE={wanted})"


def run_cell(shell: InteractiveShell, cell: str) -> Any:
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
    body, last = _compile(shell, cell)
    no_tpu = os.environ.get("PJRT_DEVICE") == "CPU"
    counting = libraries.counting_cores(1) if no_tpu else contextlib.nullcontext()
    try:
        with launchers.calling_here(0), counting:
            exec(body, shell.user_ns)
            return None if last is None else eval(last, shell.user_ns)
    except BaseException as error:
        _show_without_us(shell, error, body.co_filename)
        if _QUEUES in str(error):
            print(_BACKWARD_BEFORE_XLA, file=sys.stderr)
        raise


def _compile(shell: InteractiveShell, cell: str) -> tuple[CodeType, CodeType | None]:
    """The cell's statements, and its last expression apart if it ends with one."""
    number = shell.displayhook.prompt_count  # this cell's, in every IPython (see History)
    empty = len(cell) - len(cell.lstrip())  # IPython drops empty lines at the top
    body = "\n" * cell.count("\n", 0, empty) + shell.transform_cell(cell)
    name = shell.compile.cache(f"%%tpu_debug\n{body}", number, raw_code=cell)
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
    here = str(Path(__file__).parent)
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
