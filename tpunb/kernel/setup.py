"""The report of `%tpu_setup`, and the checks of this machine before a run starts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from json import dumps

from tpunb.backends.torchtpu.loading import is_loaded
from tpunb.display import front_end
from tpunb.display.doctor_report import report_card, report_text
from tpunb.kernel import device
from tpunb.machine import machine, tpu_users
from tpunb.machine.doctor import SetupReport
from tpunb.utils.errors import DeviceBusyError

PRELOADING, PRELOADED = "preloading in the background", "preloaded"
_POLL, _MOST_POLLS = 0.5, 240
"""Seconds between polls for the end of preloading, and the number of polls."""
_LEAVING = 0.5
"""Seconds within which the ranks of a run that has just ended release the TPU."""


def show_report(
    report: SetupReport, *, preload: str, json: bool, preloaded: Callable[[], bool] = lambda: False
) -> None:
    """Show the environment in the running cell.

    `preload`: the state of preloading, '' if there is none. Once `preloaded()` is true, the card
    is updated.
    """
    kernel = os.environ.get("PJRT_DEVICE", "CPU")
    if json:
        values = {**report.to_json(), "runs": report.room.runs, "kernel_device": kernel}
        print(dumps(values, indent=1))
        return
    leaves = kernel == "CPU" and report.machine.device == "TPU" and not is_loaded()
    rehearses = "has loaded torch_tpu" if is_loaded() else "rehearses TorchTPU on the CPU"
    device = {"xla": f"uses XLA on {kernel}", "torchtpu": rehearses}
    library = "torch_xla" if report.machine.backend == "xla" else "torch"

    def bundle(preload: str) -> dict[str, str]:
        rows = []
        if what := device.get(report.machine.backend):
            rows = [("kernel", what + ", so runs can take the TPU" * leaves)]
        rows += [(library, preload)] if preload else []
        return {"text/html": report_card(report, rows), "text/plain": report_text(report, rows)}

    publish = front_end.show_bundle(bundle(preload))
    if publish is None or not preload or preload == PRELOADED:
        return

    def update() -> None:
        for _ in range(_MOST_POLLS):
            time.sleep(_POLL)
            if preloaded():
                publish(bundle(PRELOADED))
                return

    threading.Thread(target=update, name="tpunb-setup-card", daemon=True).start()


def require_free_tpu(env: Mapping[str, str]) -> None:
    """Raise DeviceBusyError if a process that does not take turns with runs holds the TPU."""
    root = machine.root_of(env)
    for wait in (_LEAVING, 0):
        holders = [holder for holder in tpu_users.find_tpu_users(root) if not holder.living]
        if not holders:
            return
        time.sleep(wait)
    holder = holders[0]
    cell = device.cell_that_took_device() if holder.kind == "own_kernel" else None
    since = "" if cell is None else f" since cell [{cell}]"
    raise DeviceBusyError(f"{holder.describe()}{since}", holder.fix())
