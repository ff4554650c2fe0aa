"""Starts and ends the process that measures this host's chips (tpunb.machine.chip_meter)."""

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
"""libtpu's variable: the ports on which the processes of this host serve their chips' metrics."""
LIBRARY = "tpu_info"
_METER = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from tpunb.machine import chip_meter; chip_meter.main()"
)


class MeterProcess:
    """The chip meter of one run on this host."""

    def __init__(self, run: RunDir, ports: str) -> None:
        """Start the process. Raises OSError if it cannot be started."""
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
        """Kill the process. Nothing is lost: it writes each measurement whole."""
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            self._popen.stdin.close()


def start_meter(run: RunDir, device: str, env: Mapping[str, str]) -> MeterProcess | None:
    """Start a meter; None without chips, or without the library that reads their metrics."""
    if device != "TPU" and PORTS not in env:
        return None
    if importlib.util.find_spec(LIBRARY) is None:
        return None
    with contextlib.suppress(OSError):  # no memory for the process: nothing is shown
        return MeterProcess(run, env.get(PORTS, ""))
    return None
