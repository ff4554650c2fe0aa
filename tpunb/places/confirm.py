"""Asks before runs at a place that may cost more than its `ask_above`."""

from __future__ import annotations

from collections.abc import Callable

from IPython.core.error import StdinNotImplementedError  # raised if there is no input

from tpunb.places.target import Target
from tpunb.utils.errors import TpunbError


def confirm_cost(
    target: Target,
    timeout: float | None,
    ask: Callable[[str], str],
    yes: str,
) -> None:
    """Ask whether a run with this time-out may start, if it may cost too much.

    `ask` has the signature of `input`; `yes` is the option that answers, as the user writes it.
    Raises TpunbError if the answer is no, or if there is no input.
    """
    warning = _cost_warning(target, timeout)
    if warning is None:
        return
    try:
        answer = ask(f"{warning}. Start it? [y/N] ")
    except (EOFError, StdinNotImplementedError):  # a terminal, or a front end, without input
        raise TpunbError(
            f"{warning}, and there is no terminal or notebook to ask in: `{yes}` starts it "
            "without asking, --timeout limits what it costs; nothing was started"
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
