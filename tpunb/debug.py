"""`%%tpu_debug`: the cell in the kernel, on one core."""

from __future__ import annotations
import __future__

import ast
import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb import spmd
from tpunb.errors import ConversionError, MissingPackageError
from tpunb.models import Device

_chosen = False
_spmd = False
_taken_in: int | None = None
"""The cell in which the kernel's own XLA runtime was started; 0: one that is not known."""
_ENVIRON = Path("/proc/self/environ")
"""What this process was started with."""
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


def is_persons(executed: Iterable[str]) -> bool:
    """Whether the kernel's PJRT_DEVICE is the person's choice. `executed`: the cells that ran.

    Otherwise it is tpunb's, or that of torch_xla, whose import always sets it: to TPU where it
    finds one (2.9, runtime.py).
    """
    if "PJRT_DEVICE" not in os.environ or _chosen:
        return False
    if "torch_xla" not in sys.modules or b"PJRT_DEVICE=" in _ENVIRON.read_bytes():
        return True
    return any("PJRT_DEVICE" in text or "set_device_type" in text for text in executed)


def switched_spmd_on() -> bool:
    """Whether a %%tpu_debug cell has called `xr.use_spmd()`: later runs have nothing of it."""
    return _spmd


def watch(shell: InteractiveShell) -> None:
    """Notice in which cell the kernel takes its XLA device."""
    global _taken_in
    if _runtime_runs():
        _taken_in = 0
    shell.events.register("post_run_cell", _note_cell)


def unwatch(shell: InteractiveShell) -> None:
    """Notice it no more."""
    shell.events.unregister("post_run_cell", _note_cell)


def _note_cell(result: Any) -> None:
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


def kernel_device(wanted: Device | None = None, *, persons: bool = False) -> str | None:
    """Choose the kernel's own XLA device: without `wanted` as chosen before, or the CPU.

    Chips are exclusive: a kernel that holds the TPU blocks every run, so it is the CPU unless
    the person asks for the TPU. `persons`: that PJRT_DEVICE is the person's choice, which stays.
    Returns what to tell the person; None if nothing has changed that could.
    """
    global _chosen
    now = os.environ.get("PJRT_DEVICE")
    if (now == wanted) if wanted is not None else (persons or _chosen):
        return None
    if persons:
        return f"the kernel's own XLA device stays the {now}, as PJRT_DEVICE says in this notebook"
    if _runtime_runs():
        if wanted is None:
            return None
        since = f" since cell [{_taken_in}]" if _taken_in else ""
        return (
            f"the kernel's own XLA device stays the {now}: it is in use{since}. "
            f"Restart the kernel, then ask for the {wanted} first"
        )
    wanted = wanted or "CPU"
    os.environ["PJRT_DEVICE"] = wanted
    _chosen = True
    return (
        None
        if now == wanted
        else (f"the kernel's own XLA device is the {wanted} (PJRT_DEVICE={wanted})")
    )


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
    global _spmd
    body, last = _compile(shell, cell)
    before = spmd.is_on(os.environ)
    no_tpu = os.environ.get("PJRT_DEVICE") == "CPU"
    counting = libraries.counting_cores(1) if no_tpu else contextlib.nullcontext()
    try:
        with launchers.calling_here(0), counting, _no_crash(no_tpu):
            exec(body, shell.user_ns)
            return None if last is None else eval(last, shell.user_ns)
    except BaseException as error:
        _show_without_us(shell, error, body.co_filename)
        if _QUEUES in str(error):
            print(_BACKWARD_BEFORE_XLA, file=sys.stderr)
        raise
    finally:
        _spmd = _spmd or (spmd.is_on(os.environ) and not before)


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
