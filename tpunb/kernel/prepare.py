"""Checks the options of a run against its target, before its notebook is converted."""

from __future__ import annotations

import os

from IPython.core.error import UsageError

from tpunb.backends.choice import require_one_host
from tpunb.kernel.options import Cores, TrainOptions, ranks_to_show
from tpunb.machine import environment
from tpunb.machine.machine import Machine
from tpunb.places.hosts_target import Target
from tpunb.utils import env_vars


def check_options(options: TrainOptions, target: Target, here: Machine) -> tuple[Machine, int]:
    """Return a machine of the target, and the number of cores of the run.

    `here`: this machine. Raises UsageError for options that do not fit the target.
    """
    machine = target.machine(here)
    require_one_host(machine.backend, machine.device, len(target.hosts))
    if refusal := environment.refused_variables(dict(options.env), machine):
        raise UsageError(f"{options.written('env')} {refusal}")
    forced = None if target.hosts else os.environ.get(env_vars.CORES)
    written = "tpunb run --cores" if forced else options.written("cores")
    cores = choose_cores(target, forced or options.cores, written)
    ranks_to_show(options.ranks, cores, options.written("ranks"))
    return machine, cores


def choose_cores(target: Target, wanted: Cores | str | None, option: str) -> int:
    """Return the number of cores of a run, all hosts together.

    `option`: as the user writes it. Raises UsageError if the target cannot run that many.
    """
    try:
        return target.choose_cores(wanted)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
