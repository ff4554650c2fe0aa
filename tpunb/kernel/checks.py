"""Checks of a run's options that need no notebook, and so run before the slow steps."""

from __future__ import annotations

import os

from IPython.core.error import UsageError

from tpunb.kernel.options import Cores, TrainOptions
from tpunb.machine import environment
from tpunb.machine.machine import Machine
from tpunb.places.target import Target
from tpunb.utils import env_vars
from tpunb.utils.text import parse_ranks


def refuse_variables(options: TrainOptions, here: Machine) -> None:
    """Raise UsageError for variables of `--env` that a run on this machine cannot have."""
    refusal = environment.refused_variables(dict(options.env), here)
    if refusal is not None:
        raise UsageError(f"{options.written('env')} {refusal}")


def choose_cores(
    options: TrainOptions, here: Machine, target: Target | None = None, default: int | None = None
) -> int:
    """Return the number of cores of a run, all hosts together.

    `default`: the number chosen with `%tpu_setup`. Raises UsageError if the machine, or the place,
    cannot run that many.
    """
    written = options.written("cores")
    if target is not None:
        try:
            return target.choose_cores(options.cores)
        except ValueError as error:
            raise UsageError(f"{written}: {error}") from None
    forced = os.environ.get(env_vars.CORES)
    if forced is not None:
        return check_cores(here, "all" if forced == "all" else int(forced), "tpunb run --cores")
    if options.cores is None:
        return default or check_cores(here, "all", written)
    return check_cores(here, options.cores, written)


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
