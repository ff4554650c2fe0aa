"""Starts and ends the process that measures chips or GPUs (tpunb.machine.chip_meter)."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
from collections.abc import Mapping

from tpunb.runs.directory import RunDir
from tpunb.utils import interrupts, processes
from tpunb.utils.processes import Process

PORTS = "TPU_RUNTIME_METRICS_PORTS"
"""libtpu's variable: the ports on which the processes of this host serve their chips' metrics."""
LIBRARIES = {"TPU": "tpu_info", "GPU": "pynvml"}


class MeterProcess:
    """The chip meter of one run on this host."""

    def __init__(self, run: RunDir, device: str, env: Mapping[str, str]) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        which = env.get("CUDA_VISIBLE_DEVICES", "all") if device == "GPU" else env.get(PORTS, "")
        asked = [str(run.path), device, which, str(os.getpid())]
        self._popen = interrupts.start_in_own_session(
            "from tpunb.machine import chip_meter; chip_meter.main()",
            *asked,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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
    """Start a meter; None without chips and GPUs, or without the library that measures them."""
    measured = "TPU" if PORTS in env else device
    if measured == "CPU" or importlib.util.find_spec(LIBRARIES[measured]) is None:
        return None
    with contextlib.suppress(OSError):  # no memory for the process: nothing is shown
        return MeterProcess(run, measured, env)
    return None
