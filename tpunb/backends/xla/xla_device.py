"""Prepares, starts and finishes the XLA device of a rank, so that a plain loop finds it."""

from __future__ import annotations

import os
import sys
from typing import Any

from tpunb.backends.base import RankSetup
from tpunb.backends.choice import require_one_host
from tpunb.backends.xla import spmd, topology
from tpunb.runs import heartbeat
from tpunb.utils import addresses, env_vars


def prepare_device(setup: RankSetup) -> None:
    """Prepare the device before any of the user's code, without starting the XLA runtime.

    On a TPU, set variables that give this process its own chip; on CPU, give several ranks
    rehearsal collectives. In SPMD mode this process drives all chips that it sees, or on CPU the
    number in CPU_NUM_DEVICES, which was set before.
    """
    world_size, local_world_size = setup.world_size, setup.local_world_size
    if setup.device == "TPU":
        if setup.hosts > 1:
            addresses.bind_gloo(os.environ)
        if setup.spmd is None or (setup.spmd == 1 and world_size == 1):
            take_chip(setup.local_rank, local_world_size, world_size)
        if setup.spmd is not None:  # `begin` may come after the first device
            keep_compiled(setup.local_rank, local_world_size)
        return
    from tpunb.backends.xla import tpu_answers

    tpu_answers.answer_as_tpu(local_world_size)
    spmd.prepare_spmd()
    if world_size > 1:
        from tpunb.backends.rehearsal.install import FOREVER
        from tpunb.backends.xla.rehearsal.install_xla import install_rehearsal

        require_one_host("xla", setup.device, setup.hosts)
        install_rehearsal(setup.rank, world_size, FOREVER)
        spmd.refuse_in_ranks()


def take_chip(local_rank: int, local_world_size: int, world_size: int) -> None:
    """Set the variables of this process and its chip, as torch_xla's own launcher does.

    If the slice's shape is unknown, raises what torch_xla raises: EnvironmentError, or
    requests.RequestException if no metadata server answers.
    """
    import torch_xla.core.xla_env_vars as xenv
    from torch_xla._internal import tpu

    for name, value in topology.changes(os.environ).items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    os.environ.setdefault(xenv.PJRT_LOCAL_PROCESS_RANK, str(local_rank))
    os.environ.setdefault(xenv.PJRT_LOCAL_PROCESS_COUNT, str(local_world_size))
    if world_size == 1:
        tpu.configure_one_chip_topology()
    else:
        tpu.configure_topology(local_rank, local_world_size)


def keep_compiled(local_rank: int, local_world_size: int) -> None:
    """Keep compiled programs for later runs, if the run's environment names a folder for them.

    Not on a CPU, whose programs cannot be read back (measured with torch_xla 2.9). Each rank has
    its own folder, because ranks write at the same time. If the user has called
    `xr.initialize_cache`, nothing changes.
    """
    from pathlib import Path

    import torch_xla.runtime as xr
    from torch_xla.version import __version__

    folder = os.environ.get(env_vars.XLA_CACHE, "off")
    if folder == "off" or "XLA_PERSISTENT_CACHE_PATH" in os.environ:
        return
    place = Path(folder, __version__, f"{local_rank}-of-{local_world_size}")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"tpunb: compiled programs are not kept: {place}: {error.strerror}", file=sys.stderr)
        return
    xr.initialize_cache(str(place))


def start_device(setup: RankSetup) -> None:
    """Right before the train cell: on a TPU, start the runtime as torch_xla's launcher does.

    Not earlier, because `xr.initialize_cache` in the prelude must come before it; and not at
    all for SPMD, which the cell itself may switch on, before the first device.
    """
    if setup.device == "TPU" and setup.spmd is not None:
        heartbeat.watch_counters()
    elif setup.device == "TPU":
        keep_compiled(setup.local_rank, setup.local_world_size)
        if setup.world_size == 1:
            from torch_xla._internal import pjrt

            pjrt.initialize_singleprocess()
        else:
            start_runtime_with_others()
        heartbeat.watch_counters()


def start_runtime_with_others() -> None:
    """Start this process's TPU runtime as one of several, after `take_chip`.

    The second half of torch_xla's pjrt.initialize_multiprocess, which would read the topology
    again, from variables that describe this process by now (and on v7x have four dimensions, where
    it expects three).
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    devices: list[Any] = xm.get_xla_supported_devices()  # names, which are accepted as well
    xm.set_replication(torch_xla.device(), devices)
    spmd.check_devices()


def count_chips() -> int:
    """TPU chips of this machine, as torch_xla counts them."""
    from torch_xla._internal import tpu

    chips: int = tpu.num_available_chips()
    return chips
