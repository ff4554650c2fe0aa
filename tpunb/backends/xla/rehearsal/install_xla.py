"""Rehearsal: several ranks on CPU, for machines without a TPU.

torch_xla has no collectives across processes on CPU. In a rehearsal each rank has an XLA client of
its own with one device, and data that torch_xla would send over the TPU's interconnect goes through
`transport`. Importing this module replaces nothing; on a TPU `install_rehearsal` is never called.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_xla.version import __version__

from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.c10d_stores import ProcessGroupStores
from tpunb.backends.rehearsal.errors import make_refusal
from tpunb.backends.rehearsal.install import connect_ranks, memory_info
from tpunb.backends.rehearsal.waiting import WaitTimes
from tpunb.backends.rehearsal.wire import TIMEOUT
from tpunb.backends.xla import private_names, runtime
from tpunb.backends.xla.private_names import NAMES, OPS, XLAC
from tpunb.backends.xla.rehearsal import divergence, dynamo, launches
from tpunb.backends.xla.rehearsal.comparison import XlaComparison
from tpunb.backends.xla.rehearsal.cross_replica import CrossReplica
from tpunb.backends.xla.rehearsal.xla_process_group import (
    replace_xla_rendezvous,
    warn_of_bucket_views,
    warn_of_pairs,
)
from tpunb.utils.errors import SetupError

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_library: torch.library.Library | None = None
"""Kept alive, because its operators live only as long as it does."""


def install_rehearsal(
    rank: int,
    world_size: int,
    timeout: float = TIMEOUT,
    times: WaitTimes | None = None,
) -> None:
    """Make this process rank `rank` of `world_size` for torch_xla, with rehearsed collectives.

    Call it once per process, after the import of torch_xla, before the user's code and before
    anything starts the XLA runtime. Reads MASTER_ADDR, MASTER_PORT and
    TORCHELASTIC_RESTART_COUNT, which locate torch elastic's store; connects to it at the first
    collective. `timeout`: seconds that a rank waits for the others in a collective.

    Raises SetupError if the versions do not fit, or torch elastic serves no store.
    """
    _check_versions()
    agent = Agent.from_environment(rank, world_size)
    wire = connect_ranks(agent, timeout, times, XlaComparison())
    # As pjrt.initialize_multiprocess sets them, for xr.local_ordinal() and similar functions.
    os.environ[xenv.PJRT_LOCAL_PROCESS_RANK] = str(rank)
    os.environ[xenv.PJRT_LOCAL_PROCESS_COUNT] = str(world_size)
    vars(xr).update(_WORLD_SIZE=world_size, _ORDINAL=rank)
    xr.global_runtime_device_count.cache_clear()
    share_processors(os.environ, world_size)

    collectives = CrossReplica(wire, world_size)
    replaced = _identity(rank, world_size) | collectives.xlac() | _refusals(XLAC)
    replaced["_xla_memory_info"] = lambda device: memory_info(world_size)
    for name, function in replaced.items():
        # dynamo traces torch_xla's own functions no more than these.
        setattr(_XLAC, name, torch.compiler.disable(function))
    vars(xm).update(collectives.model())
    dynamo.patch_dynamo_bridge()
    stores = ProcessGroupStores(agent, wire)
    stores.install()
    replace_xla_rendezvous(wire, stores)
    warn_of_bucket_views()
    warn_of_pairs(world_size)
    register_optimizer_step_post_hook(divergence.programs.note_optimizer_step)
    register_optimizer_step_post_hook(launches.launches.note_optimizer_step)
    launches.watch_launches()
    runtime.wrap_step_marker(_note_sync)
    _replace_operators(collectives.operators() | _refusals(OPS))


def _refusals(owner: str) -> dict[str, Callable[..., Any]]:
    return {
        n.name: make_refusal(n.name, n.why)
        for n in NAMES
        if n.kind == "refused" and n.owner == owner
    }


def _note_sync(marker: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(marker)
    def mark_step(*args: Any, **options: Any) -> Any:
        begun = launches.count_outputs()
        result = marker(*args, **options)
        launches.launches.note_sync(launches.count_outputs() - begun)
        return result

    return mark_step


def _identity(rank: int, world_size: int) -> dict[str, Callable[..., Any]]:
    """Functions that describe this process as one with one core of a TPU."""
    devices = [f"CPU:{ordinal}" for ordinal in range(world_size)]
    return {
        "_xla_get_process_index": lambda: rank,
        "_xla_get_num_processes": lambda: world_size,
        "_xla_get_default_device_ordinal": lambda: rank,
        "_xla_get_device_ordinal": lambda device: rank,
        "_xla_get_replication_devices_count": lambda: world_size,
        "_xla_get_replication_devices": lambda: list(devices),
        "_xla_set_replication_devices": lambda devices: None,
        "_xla_get_all_devices": lambda: list(devices),
        "_xla_get_all_runtime_devices": lambda: list(devices),
        "_xla_get_all_device_attributes": lambda: [{"name": name} for name in devices],
        "_xla_num_global_devices": lambda: world_size,
    }


def _replace_operators(operators: dict[str, Callable[..., Any]]) -> None:
    global _library
    _library = torch.library.Library(OPS, "IMPL", "XLA")
    with warnings.catch_warnings():
        # The override is intended, but torch 2.8 lacks the parameter allow_override.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, function in operators.items():
            _library.impl(name, function)


def _check_versions() -> None:
    version = ".".join(__version__.split(".")[:2])
    if version not in private_names.VERSIONS:
        raise SetupError(
            f"rehearsal on CPU cores needs torch_xla {' or '.join(private_names.VERSIONS)}, but "
            f"{__version__} is installed. Install one of these, or use one core (--cores 1) or a "
            "TPU"
        )
    missing = [n.name for n in NAMES if n.owner == XLAC and not hasattr(_XLAC, n.name)]
    if missing:
        raise SetupError(
            f"torch_xla {__version__} lacks names that a rehearsal replaces: {', '.join(missing)}"
        )


THREADS = ("PJRT_NPROC", "NPROC")
"""XLA's CPU client reads these when it starts, in this order, and makes pools of that many
threads, or of one thread per processor (torch_xla 2.8 and 2.9)."""


def share_processors(env: MutableMapping[str, str], local_world_size: int) -> None:
    """Limit XLA in this process to its share of the processors, unless the user has set a number.

    torch's own operations read OMP_NUM_THREADS, as in torchrun's workers.
    """
    if not any(name in env for name in THREADS):
        share = len(os.sched_getaffinity(0)) // local_world_size
        env[THREADS[0]] = str(max(1, share))
