"""Checks of a run's options that need no notebook, and so run before the slow steps."""

from __future__ import annotations

from IPython.core.error import UsageError

from tpunb.kernel.options import Cores
from tpunb.machine.machine import Machine
from tpunb.utils.text import parse_ranks


def check_cores(here: Machine, requested: Cores, option: str) -> int:
    """Return the number of cores; raise UsageError if this machine cannot run that many."""
    cores = here.default_cores if requested == "all" else requested
    problem = here.check_cores(cores)
    if problem is not None:
        raise UsageError(f"{option}: {problem}")
    return cores


def ranks_to_show(text: str, world_size: int, option: str) -> frozenset[int]:
    """Parse the value of `--ranks`; raise UsageError for a rank that the run does not have."""
    try:
        return parse_ranks(text, world_size)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
