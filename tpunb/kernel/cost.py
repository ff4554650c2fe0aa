"""Cost of a run at a place: above a limit, the user must confirm it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from IPython.core.error import StdinNotImplementedError  # raised if there is no input

from tpunb.kernel.options import TrainOptions
from tpunb.places.target import Target
from tpunb.utils.errors import TpunbError


def confirm(
    target: Target, options: TrainOptions, ask: Callable[[str], str], yes: str = ""
) -> None:
    """Ask the user to confirm a run that may cost more than the place's `ask_above`.

    `ask` is called like `input`; `yes` is the option that confirms in advance, as the user writes
    it. Raises TpunbError if the answer is no, or the user cannot be asked.
    """
    warning = None if options.yes else _cost_warning(target, options.timeout)
    if warning is None:
        return
    try:
        answer = ask(f"{warning}. Start it? [y/N] ")
    except (EOFError, StdinNotImplementedError):  # a terminal, or a front end, without input
        raise TpunbError(
            f"{warning}, and there is no terminal or notebook to ask in: "
            f"`{yes or options.written('yes')}` starts it without asking, --timeout limits what "
            "it costs; nothing was started"
        ) from None
    except KeyboardInterrupt:
        raise TpunbError("interrupted before the run began: nothing was started") from None
    if answer.strip().lower() not in ("y", "yes"):
        raise TpunbError(f"not started, as the answer was no. {warning}")


def _cost_warning(target: Target, timeout: float | None) -> str | None:
    """A warning if a run may cost more than `ask_above`, otherwise None."""
    allowed, estimate = target.ask_above, target.estimate
    most = estimate.most(timeout)
    if allowed is None or (most is not None and most <= allowed):
        return None
    told = "".join(f"{line}. " for line in estimate.describe(timeout)[:1])
    return f"{told}It may cost more than ${allowed:.2f} (ask_above of [places.{target.place_name}])"


def ask(prompt: str) -> str:
    """Call `input` so that the interrupt key ends it in a block that counts its presses."""
    if threading.current_thread() is not threading.main_thread():
        return input(prompt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, before)
