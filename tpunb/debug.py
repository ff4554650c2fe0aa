"""`%%tpu_debug`: the cell in the kernel, on one core."""

from __future__ import annotations

import ast
import os
import sys
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.errors import MissingPackageError

_chosen = False


def chosen_by_us() -> bool:
    """Whether the kernel's PJRT_DEVICE is tpunb's doing, not the person's."""
    return _chosen


def kernel_device() -> str | None:
    """Make the CPU the kernel's own XLA device unless the person has chosen one.

    Chips are exclusive: a kernel that holds the TPU would block every run. Returns what to
    tell the person, once; None if there is nothing to tell.
    """
    global _chosen
    if os.environ.get("PJRT_DEVICE"):
        return None
    xla = sys.modules.get("torch_xla")
    if xla is not None and xla._XLAC._xla_runtime_is_initialized():
        return None
    os.environ["PJRT_DEVICE"] = "CPU"
    _chosen = True
    return "the kernel's own XLA device is the CPU (PJRT_DEVICE=CPU); runs choose their own"


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
