"""Cost of a run at a place: it is shown, and above a limit the user must confirm it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from IPython.core.error import StdinNotImplementedError  # raised if there is no input

from tpunb.kernel.options import TrainOptions
from tpunb.places.hosts_target import HostsTarget, Target
from tpunb.utils.errors import TpunbError
from tpunb.utils.text import duration


def describe(target: Target, timeout: float | None) -> str:
    """What a run with this `--timeout` will cost at a place; '' here, and without a TPU."""
    if not isinstance(target, HostsTarget):
        return ""
    if (price := target.price) is None:
        name, device = target.place_name, target.report.first.machine.device
        unknown = f"the cost is not known: the price list does not cover the hosts of {name}"
        return "" if device == "CPU" else unknown
    if timeout is None:
        return f"{price}; no limit without --timeout"
    return f"{price}; at most ${price.cost(timeout):.2f}, in {duration(timeout)}"


def confirm(
    target: Target, options: TrainOptions, ask: Callable[[str], str], yes: str = ""
) -> None:
    """Ask the user to confirm a run that may cost more than the place's `ask_above`.

    `ask` is called like `input`; `yes` is the option that confirms in advance, as the user writes
    it. Raises TpunbError if the answer is no, or the user cannot be asked.
    """
    if options.yes or not isinstance(target, HostsTarget):
        return
    allowed, price = target.place.host_settings.ask_above, target.price
    most = None if price is None or options.timeout is None else price.cost(options.timeout)
    if allowed is None or (most is not None and most <= allowed):
        return
    told = f"{line}. " if (line := describe(target, options.timeout)) else ""
    limit = f"(ask_above of [places.{target.place_name}])"
    warning = f"{told}It may cost more than ${allowed:.2f} {limit}"
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


def ask(prompt: str) -> str:
    """Call `input` so that the interrupt key ends it in a block that counts its presses."""
    if threading.current_thread() is not threading.main_thread():
        return input(prompt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, before)
