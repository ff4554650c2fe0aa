"""IPython itself, in a process of its own that runs one notebook after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

WORKER = """\
import contextlib, io, json, os, sys
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
answers = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
for line in sys.stdin:
    folder, cells, names = json.loads(line)
    os.chdir(folder)
    shell.reset()
    told = io.StringIO()
    failed = None
    with contextlib.redirect_stdout(told):
        for cell in cells:
            result = shell.run_cell(cell, store_history=True)
            if not result.success and failed is None:
                failed = repr(result.error_in_exec or result.error_before_exec)
    values = {name: shell.user_ns.get(name) for name in names}
    print(json.dumps([failed, told.getvalue(), values], default=repr), file=answers, flush=True)
"""


class Shell:
    """A worker that lives until `close`."""

    def __init__(self, folder: Path) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, folder: Path, *cells: str, names: tuple[str, ...] = ()) -> tuple[str, Any]:
        """Run cells in a namespace of their own: what they write, and values of names."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(f"{json.dumps([str(folder), cells, names])}\n")
        self._worker.stdin.flush()
        failed, told, values = json.loads(self._worker.stdout.readline())
        assert failed is None, f"{failed}\n{told}"
        return told, values

    def close(self) -> None:
        self._worker.communicate(timeout=300)
