"""Asks before runs at a place that may cost more than its `ask_above`."""

from __future__ import annotations

from collections.abc import Callable

from IPython.core.error import StdinNotImplementedError  # IPython's name for "no input here"

from tpunb.places.target import Target
from tpunb.utils.errors import TpunbError


def confirm_cost(
    target: Target, timeout: float | None, ask: Callable[[str], str], yes: str, *, runs: int = 1
) -> None:
    """Ask whether runs with this time-out may start, if all together may cost too much.

    `ask` is called as `input` is; `yes` is the option that answers, as the user would write it.
    Raises TpunbError if the answer is no, or nobody can be asked.
    """
    asked = _question(target, timeout, runs)
    if asked is None:
        return
    them = "it" if runs == 1 else "them"
    try:
        answer = ask(f"{asked}. Start {them}? [y/N] ")
    except (EOFError, StdinNotImplementedError):
        raise TpunbError(
            f"{asked}, and nobody is there to be asked: `{yes}` starts {them} without a question, "
            "--timeout limits what each costs; nothing was started"
        ) from None
    except KeyboardInterrupt:
        raise TpunbError("interrupted before the run began: nothing was started") from None
    if answer.strip().lower() not in ("y", "yes"):
        raise TpunbError(f"not started, as the answer was no. {asked}")


def _question(target: Target, timeout: float | None, runs: int) -> str | None:
    """What to ask; None if they may just start."""
    allowed, estimate = target.place.settings.ask_above, target.estimate
    most = estimate.most(timeout)
    if allowed is None or runs < 1 or (most is not None and runs * most <= allowed):
        return None
    price = estimate.price
    named = f"{allowed:g}" if price is None else price.amount(allowed)
    told = "".join(f"{line}. " for line in estimate.describe(timeout)[:1])
    it = "It" if runs == 1 else f"All {runs} runs together"
    return f"{told}{it} may cost more than {named} (ask_above of [places.{target.place.name}])"
