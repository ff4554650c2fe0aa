"""What `%tpu_setup` shows in a kernel, and what must be right before a run begins there."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from json import dumps

from tpunb import debug
from tpunb.display import frontend
from tpunb.display.setup import card, text
from tpunb.errors import DeviceBusyError, MissingPackageError
from tpunb.platforms import holders, machine
from tpunb.platforms.report import Report

_LEAVING = 0.5
"""Seconds in which ranks of a run that has just ended are gone."""


def show(found: Report, *, agent: str, json: bool) -> None:
    """Show what was found, in the cell that runs now. `agent`: the warm agent's state, if any."""
    kernel = os.environ.get("PJRT_DEVICE", "CPU")
    if json:
        told = {**found.to_json(), "runs": found.room.runs, "kernel_device": kernel}
        print(dumps(told, indent=1))
        return
    own = [("kernel", f"its own XLA device is the {kernel}")]
    own += [("agent", agent)] if agent else []
    frontend.show({"text/html": card(found, own), "text/plain": text(found, own)})


def refuse_if_held(env: Mapping[str, str]) -> None:
    """Raise DeviceBusyError if somebody has the TPU who does not take turns with runs."""
    root = machine.root_of(env)
    for wait in (_LEAVING, 0):
        held = [one for one in holders.look(root).holders if not one.living]
        if not held:
            return
        time.sleep(wait)
    first = held[0]
    cell = debug.taken_in() if first.kind == "this kernel" else None
    since = "" if cell is None else f" since cell [{cell}]"
    raise DeviceBusyError(f"{first.describe()}{since}", first.fix())


def need_xla(what: str) -> None:
    """Raise MissingPackageError if torch_xla is not there."""
    for package in missing_xla():
        raise MissingPackageError(
            package, what, "`pip install 'tpunb[xla]'` brings a matching pair"
        )


def missing_xla() -> list[str]:
    """Which of torch and torch_xla are not there. Looks, without importing them."""
    return [name for name in ("torch", "torch_xla") if importlib.util.find_spec(name) is None]
