"""Starts and ends the process that reads what this host's chips do (tpunb.machine.chip_meter)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

from tpunb.runs.directory import RunDir
from tpunb.utils import processes
from tpunb.utils.files import PACKAGE_ROOT
from tpunb.utils.processes import Process

PORTS = "TPU_RUNTIME_METRICS_PORTS"
"""Of libtpu: where the processes of this host serve what their chips do."""
LIBRARY = "tpu_info"
_METER = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from tpunb.machine import chip_meter; chip_meter.main()"
)


class MeterProcess:
    """The meter of one run on this host."""

    def __init__(self, run: RunDir, ports: str) -> None:
        """Raises OSError if it cannot be started."""
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _METER, PACKAGE_ROOT, str(run.path), ports, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        self.process: Process | None = processes.find_process(self._popen.pid)

    def close(self) -> None:
        """It is to end, whatever it waits for: each look is written whole."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


def start_meter(run: RunDir, device: str, env: Mapping[str, str]) -> MeterProcess | None:
    """A meter, where there are chips that may tell and the library that asks them; else None."""
    if device != "TPU" and PORTS not in env:
        return None
    if importlib.util.find_spec(LIBRARY) is None:
        return None
    with contextlib.suppress(OSError):  # no memory for it: then nothing is shown
        return MeterProcess(run, env.get(PORTS, ""))
    return None
