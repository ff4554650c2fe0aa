"""What a run at a place will cost: told before it starts, and asked where it may be too much."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from IPython.core.error import StdinNotImplementedError  # IPython's name for "no input here"

from tpunb.kernel.options import TrainOptions
from tpunb.places.target import Target
from tpunb.utils.errors import TpunbError


def refuse_options(target: Target, options: TrainOptions) -> None:
    """Raise TpunbError for an option that the place cannot honour."""
    plain = TrainOptions()
    for name, why in target.cannot.items():
        if name != "stop" and getattr(options, name) != getattr(plain, name):
            raise TpunbError(f"{options.written(name.replace('_', '-'))}: {why}")


def describe(target: Target | None, options: TrainOptions) -> list[str]:
    """Lines for the user; none for a run on this machine."""
    return [] if target is None else target.estimate.describe(options.timeout)


def question(target: Target, options: TrainOptions) -> str | None:
    """What to ask before a run starts; None if it may just start."""
    allowed = target.place.settings.ask_above
    estimate = target.estimate
    most = estimate.most(options.timeout)
    if allowed is None or options.yes or (most is not None and most <= allowed):
        return None
    price = estimate.price
    named = f"{allowed:g}" if price is None else price.amount(allowed)
    told = "".join(f"{line}. " for line in estimate.describe(options.timeout)[:1])
    return f"{told}It may cost more than {named} (ask_above of [places.{target.place.name}])"


def confirm(
    target: Target, options: TrainOptions, ask: Callable[[str], str], yes: str = ""
) -> None:
    """Ask whether a run may start if it may cost more than the place's `ask_above`.

    `ask` is called as `input` is; `yes` is the option that answers, as the user would write it.
    Raises TpunbError if the answer is no, or nobody can be asked.
    """
    asked = question(target, options)
    if asked is None:
        return
    try:
        answer = ask(f"{asked}. Start it? [y/N] ")
    except (EOFError, StdinNotImplementedError):
        raise TpunbError(
            f"{asked}, and nobody is there to be asked: `{yes or options.written('yes')}` starts "
            "it without a question, --timeout limits what it costs; nothing was started"
        ) from None
    except KeyboardInterrupt:
        raise TpunbError("interrupted before the run began: nothing was started") from None
    if answer.strip().lower() not in ("y", "yes"):
        raise TpunbError(f"not started, as the answer was no. {asked}")


def ask_in_kernel(prompt: str) -> str:
    """`input`, which the interrupt key ends also while a train cell counts its presses."""
    if threading.current_thread() is not threading.main_thread():
        return input(prompt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, before)
