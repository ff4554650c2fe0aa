"""Prepares a run for its target, from a notebook in a kernel or in a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.error import UsageError

from tpunb.backends.choice import require_one_host
from tpunb.kernel.options import Cores, TrainOptions, ranks_to_show
from tpunb.machine import environment
from tpunb.machine.machine import Machine
from tpunb.places.target import Target
from tpunb.utils import env_vars

if TYPE_CHECKING:
    from tpunb.kernel.pipeline import PreparedNotebook, RunRequest


def prepare(
    source: Callable[[int], PreparedNotebook],
    target: Target,
    options: TrainOptions,
    here: Machine,
    runs: Path,
) -> RunRequest:
    """Decide everything about a run; the quick checks come before the notebook is converted.

    `source` converts the notebook for that many ranks. `here`: this machine. `runs`: the folder in
    which `--resume` searches.

    Raises UsageError for options that do not fit the target or the notebook, and TpunbError.
    """
    machine = target.machine(here)
    require_one_host(machine.backend, machine.device, len(target.hosts))
    if refusal := environment.refused_variables(dict(options.env), machine):
        raise UsageError(f"{options.written('env')} {refusal}")
    forced = None if target.hosts else os.environ.get(env_vars.CORES)
    written = "tpunb run --cores" if forced else options.written("cores")
    cores = choose_cores(target, forced or options.cores, written)
    ranks_to_show(options.ranks, cores, options.written("ranks"))
    target.get_ready()
    # Imported late: it is large, and `%load_ext` must be fast.
    from tpunb.kernel import pipeline

    return pipeline.make_request(options, source(cores), machine, cores, runs=runs, target=target)


def choose_cores(target: Target, wanted: Cores | str | None, option: str) -> int:
    """Return the number of cores of a run, all hosts together.

    `option`: as the user writes it. Raises UsageError if the target cannot run that many.
    """
    try:
        return target.choose_cores(wanted)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
