"""Cost of a run at a place: shown before the start; above a limit the user must confirm it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from tpunb.kernel.options import TrainOptions
from tpunb.places.confirm import confirm_cost
from tpunb.places.target import Target


def confirm(
    target: Target,
    options: TrainOptions,
    ask: Callable[[str], str],
    yes: str = "",
) -> None:
    """Ask the user to confirm a run that may cost more than the place's `ask_above`.

    `ask` is called like `input`; `yes` is the option that confirms in advance, as the user writes
    it. Raises TpunbError if the answer is no, or the user cannot be asked.
    """
    if not options.yes:
        confirm_cost(target, options.timeout, ask, yes or options.written("yes"))


def ask_in_kernel(prompt: str) -> str:
    """Call `input` so that the interrupt key ends it, although a train cell counts its presses."""
    if threading.current_thread() is not threading.main_thread():
        return input(prompt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, before)
