"""Whether torch and torch_xla can be imported here: tried in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from tpunb.platforms import clashes
from tpunb.platforms.machine import Machine
from tpunb.platforms.problem import Problem
from tpunb.platforms.versions import Installed

PATIENCE = 120.0
"""Seconds. It takes 7 on two idle processors, and starts no device."""
_TRY = "import torch, torch_xla"


def problem(
    env: Mapping[str, str], here: Machine, have: Installed, sys_path: Sequence[str] = ()
) -> Problem | None:
    """Import the pair in a subprocess with the environment of a run; what is wrong, if it fails.

    `sys_path`: further folders in which it looks first.
    """
    code = f"import sys; sys.path[:0] = {list(sys_path)!r}; {_TRY}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(env), cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=PATIENCE, text=True, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Problem(
            "import-hangs",
            f"`{_TRY}` has not come back after {PATIENCE:.0f} s.",
            "see where it waits: `python -X faulthandler -X importtime -c '" + _TRY + "'`",
        )
    if done.returncode == 0:
        return None
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
    return Problem(
        "import-fails",
        f"`{_TRY}` fails in a new process ({how}): {last[0].strip() if last else 'no message'}",
        clashes.reinstall(here, have),
    )
