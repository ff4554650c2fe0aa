"""Rehearsal: several cores on CPU, for machines without a TPU.

torch_xla has no collectives across processes on CPU. Here each rank keeps an XLA client of its
own with one device, and what torch_xla would send over the TPU's interconnect goes over gloo.
Importing this module replaces nothing; on a TPU `install` is never called.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch_xla.version import __version__

from tpunb.errors import SetupError
from tpunb.worker import xla_patches
from tpunb.worker.rehearsal import compiled, divergence, machine
from tpunb.worker.rehearsal.collectives import collectives
from tpunb.worker.rehearsal.distributed import Meetings, warn_of_bucket_views
from tpunb.worker.rehearsal.gloo import TIMEOUT, Wire
from tpunb.worker.rehearsal.refusals import refusing
from tpunb.worker.xla_patches import NAMES, OPS, XLAC

_XLAC: Any = torch_xla._XLAC  # type: ignore[attr-defined]
_library: torch.library.Library | None = None
"""Kept: its operators are gone when it is."""
_wire: Wire | None = None


def install(
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    timeout: float = TIMEOUT,
) -> None:
    """Make this process rank `rank` of `world_size` for torch_xla, with collectives over gloo.

    Called once in a process, after torch_xla is imported, before the user's code and before
    anything starts the XLA runtime. MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT
    are read now: they say where torch elastic's store is. It is used at the first collective.
    `timeout`: seconds that a rank waits for the others in a collective.

    Raises SetupError if the versions do not fit, or torch elastic serves no store.
    """
    _check()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    global _wire
    _wire = wire = Wire(rank, address, port, attempt, timeout)
    # As pjrt.initialize_multiprocess sets them: xr.local_ordinal() and its like read them.
    os.environ[xenv.PJRT_LOCAL_PROCESS_RANK] = str(local_rank)
    os.environ[xenv.PJRT_LOCAL_PROCESS_COUNT] = str(local_world_size)
    vars(xr).update(_WORLD_SIZE=world_size, _ORDINAL=rank)
    xr.global_runtime_device_count.cache_clear()
    machine.share_processors(os.environ, local_world_size)

    rehearsed = collectives(wire, world_size)
    answers = _identity(rank, world_size)
    answers["_xla_memory_info"] = lambda device: machine.memory_info(local_world_size)
    for name, function in (answers | rehearsed.xlac | _refused(XLAC)).items():
        setattr(_XLAC, name, compiled.left_to_dynamo(function))
    vars(xm).update(rehearsed.model)
    compiled.install()
    Meetings(wire, world_size, address, port, attempt).install()
    warn_of_bucket_views()
    register_optimizer_step_post_hook(divergence.mine.step)
    _replace_operators(rehearsed.operators | _refused(OPS))


def _refused(owner: str) -> dict[str, Callable[..., Any]]:
    return {
        n.name: refusing(n.name, n.why) for n in NAMES if n.kind == "refused" and n.owner == owner
    }


def leave() -> None:
    """After the train cell: tell the ranks that still wait in a collective not to."""
    if _wire is not None:
        _wire.leave()


def _identity(rank: int, world_size: int) -> dict[str, Callable[..., Any]]:
    """Who this process is, as a process with one core of a TPU would answer."""
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
        # It is meant. The parameter that says so, allow_override, is not in torch 2.8.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, function in operators.items():
            _library.impl(name, function)


def _check() -> None:
    version = ".".join(__version__.split(".")[:2])
    if version not in xla_patches.VERSIONS:
        raise SetupError(
            f"rehearsal on CPU cores knows torch_xla {' and '.join(xla_patches.VERSIONS)}; this "
            f"is {__version__}. Use one core (--cores 1), a TPU, or one of these"
        )
    missing = [n.name for n in NAMES if n.owner == XLAC and not hasattr(_XLAC, n.name)]
    if missing:
        raise SetupError(f"torch_xla {__version__} lacks what rehearsal replaces: {missing}")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise SetupError(
            "rehearsal ranks find each other through the store of torch elastic, and this one "
            "serves none (TORCHELASTIC_USE_AGENT_STORE is not True): unset "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or start with plain "
            "`torchrun --nproc-per-node=N`"
        )
