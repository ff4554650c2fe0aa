"""`%%tpu_debug`: the cell in the kernel, on one core."""

from __future__ import annotations

import ast
import os
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.errors import MissingPackageError
from tpunb.models import Device

_chosen = False


def chosen_by_us() -> bool:
    """Whether the kernel's PJRT_DEVICE is tpunb's doing, not the person's."""
    return _chosen


def kernel_device(wanted: Device = "CPU") -> str | None:
    """Choose the kernel's own XLA device, unless the person's PJRT_DEVICE has.

    Chips are exclusive: a kernel that holds the TPU blocks every run, so it is the CPU unless
    the person asks for the TPU. Returns what to tell the person; None if nothing has changed.
    """
    global _chosen
    if os.environ.get("PJRT_DEVICE") and not _chosen:
        return None
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        return None
    if os.environ.get("PJRT_DEVICE") == wanted:
        return None
    os.environ["PJRT_DEVICE"] = wanted
    _chosen = True
    return f"the kernel's own XLA device is the {wanted} (PJRT_DEVICE={wanted})"


def run_cell(shell: InteractiveShell, cell: str) -> Any:
    """Run a cell's source in the notebook's namespace, with launchers calling their function here.

    The value of a last expression is returned. Line numbers in tracebacks are those of the
    whole cell, the magic's line included.
    """
    try:
        from tpunb.worker import launchers
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "torch_xla"):
            raise
        raise MissingPackageError(
            error.name, "%%tpu_debug", "`pip install 'tpunb[xla]'` brings a matching pair"
        ) from error
    body, last = _compile(shell, "\n" + cell)
    with launchers.calling_here(0):
        exec(body, shell.user_ns)
        return None if last is None else eval(last, shell.user_ns)


def _compile(shell: InteractiveShell, cell: str) -> tuple[Any, Any]:
    """The cell's statements, and its last expression apart if it ends with one."""
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, shell.execution_count, raw_code=cell)
    flags = shell.compile.flags  # the notebook's own __future__ imports
    tree = compile(source, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    last = None
    quiet = cell.rstrip().endswith(";")
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not quiet:
        final = ast.Expression(tree.body.pop().value)
        last = compile(final, name, "eval", flags, dont_inherit=True)
    return compile(tree, name, "exec", flags, dont_inherit=True), last
