"""A kernel's side of `--stop-when-done`: gives the order, says when a cell runs, shows the end."""

from __future__ import annotations

import html
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.display import frontend
from tpunb.display.frontend import FrontEnd
from tpunb.platforms import machine, metadata, stopping, tpu_vm
from tpunb.platforms.machine import Machine
from tpunb.platforms.stopping import Order, Status
from tpunb.platforms.tpu_vm import TpuVm

KEEP = "%tpu_setup --keep-running (in a terminal: tpunb keep)"
"""How to take it back."""

TRIES = 3
"""How often the metadata server is asked again: for this it is worth waiting."""


class Keeper:
    """One kernel's."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._activity: stopping.Activity | None = None
        self._shown: threading.Thread | None = None
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def close(self) -> None:
        """Let go of the kernel. An order stays: it is for when the kernel is gone, too."""
        self._shell.events.unregister("pre_run_cell", self._begin)
        self._shell.events.unregister("post_run_cell", self._end)
        if self._activity is not None:
            self._activity.close()

    def check(self, here: Machine, env: Mapping[str, str]) -> TpuVm:
        """The TPU VM that will be stopped. Raises SetupError if there is none that may be.

        Asks Google Cloud, which takes some seconds.
        """
        for _ in range(TRIES):
            if here.metadata.state != "stalls":
                break
            here = machine.detect(env, patience=metadata.PATIENT)
        vm = tpu_vm.ours(here, env)
        vm.check()
        return vm

    def order(self, vm: TpuVm, runs: Path, idle: float | None, run: Path | None = None) -> None:
        """Have it stopped, and show in this cell how that stands. `idle`: minutes."""
        self._activity = self._activity or stopping.Activity("this notebook")
        self._activity.say(True)
        stopping.give(
            Order(
                vm=vm,
                runs=(str(runs),),
                since=time.time(),
                run=None if run is None else str(run),
                idle=None if idle is None else 60 * idle,
                countdown=stopping.COUNTDOWN,
                root=str(machine.root_of(os.environ)),
            )
        )
        front = frontend.here()
        _show(front, Status("waiting", "this cell runs", vm=vm.name))
        self._shown = threading.Thread(
            target=_follow, args=[front], name="tpunb-keeper", daemon=True
        )
        self._shown.start()

    def _begin(self, info: Any) -> None:
        # An order may have been given by another notebook: its watcher must see this one's cells.
        if self._activity is None and stopping.given() is not None:
            self._activity = stopping.Activity("another notebook")
        if self._activity is not None:
            self._activity.say(True)

    def _end(self, result: Any) -> None:
        if self._activity is not None:
            self._activity.say(False)


def keep_running() -> str:
    """Take the order back; what to say."""
    return "this machine is kept running" if stopping.take_back() else "nothing was to be stopped"


def _follow(front: FrontEnd) -> None:
    """In a thread, until the order is carried out or taken back."""
    order, shown = stopping.given(), ""
    while order is not None:
        time.sleep(1.0)
        status = stopping.status()
        if stopping.given() != order:
            ended = status is not None and status.phase in ("stopped", "kept", "failed")
            _show(front, status if ended and status else Status("kept", vm=order.vm.name))
            return
        if status is not None and (front.publish is not None or status.phase != shown):
            _show(front, status)
            shown = status.phase


def _show(front: FrontEnd, status: Status) -> None:
    text = words(status)
    if front.publish is None:
        front.write(text + "\n")
    else:
        front.publish({"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"})


def words(status: Status) -> str:
    """How it stands, for people."""
    vm = f"TPU VM {status.vm}"
    if status.phase == "counting" and status.left is not None:
        minutes, seconds = divmod(round(status.left), 60)
        return f"{vm} is stopped in {minutes}:{seconds:02d}, unless a cell runs. Keep it: {KEEP}"
    return {
        "waiting": f"{vm} will be stopped; now {status.why}. Keep it: {KEEP}",
        "stopped": f"{vm} is being stopped; its disks stay, and cost a little",
        "failed": f"{vm} GOES ON, AND COSTS: {status.why}",
        "kept": f"{vm} is kept running{f': {status.why}' if status.why else ''}",
    }[status.phase]
