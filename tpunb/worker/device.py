"""What torch_xla must be told in a rank, so that a plain loop finds its device and its peers."""

from __future__ import annotations

import sys

from tpunb.models import Device
from tpunb.worker import pulse, spmd

FOREVER = 1e8
"""Seconds: three years."""


def prepare(
    device: Device,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    patience: float,
    spmd_cores: int | None,
) -> None:
    """Before any of the user's code: nothing here starts the XLA runtime.

    On a TPU the environment gives this process its own chip; on CPU several ranks get
    rehearsal collectives. `patience` is the run's hang time-out in seconds (0: none).
    `spmd_cores`: how many cores this process drives alone, in SPMD mode: on a TPU all chips
    that it sees, on CPU as many as CPU_NUM_DEVICES says, which was set before.
    """
    if device == "TPU":
        if spmd_cores is None or spmd_cores == 1:
            _own_chip(local_rank, local_world_size)
        if spmd_cores is not None:  # `begin` may come after the first device
            keep_compiled(local_rank, local_world_size)
        return
    from tpunb.worker import libraries

    libraries.count_cores(world_size)
    spmd.prepare()
    if world_size > 1:
        from tpunb.worker.rehearsal.install import install

        # A run without a sign of life is ended by the guard, which knows where all ranks are.
        # This is for ranks that wait while another goes on, which may be meant.
        timeout = 4 * patience or FOREVER
        install(rank, world_size, local_rank, local_world_size, timeout)
        spmd.refuse_in_ranks()


def _own_chip(local_rank: int, local_world_size: int) -> None:
    """The environment half of torch_xla's own start of a process (pjrt.initialize_*)."""
    import os

    import torch_xla.core.xla_env_vars as xenv
    from torch_xla._internal import tpu

    os.environ.setdefault(xenv.PJRT_LOCAL_PROCESS_RANK, str(local_rank))
    os.environ.setdefault(xenv.PJRT_LOCAL_PROCESS_COUNT, str(local_world_size))
    if local_world_size == 1:
        tpu.configure_one_chip_topology()
    else:
        tpu.configure_topology(local_rank, local_world_size)


def keep_compiled(local_rank: int, local_world_size: int) -> None:
    """Keep what is compiled for later runs, where the run's environment names a folder for it.

    Not on a CPU, whose programs cannot be read back (measured with torch_xla 2.9). A folder for
    each rank: they write at once. What the person's own `xr.initialize_cache` has chosen stays.
    """
    import os
    from pathlib import Path

    import torch_xla.runtime as xr
    from torch_xla.version import __version__

    folder = os.environ.get("TPUNB_XLA_CACHE", "off")
    if folder == "off" or "XLA_PERSISTENT_CACHE_PATH" in os.environ:
        return
    place = Path(folder, __version__, f"{local_rank}-of-{local_world_size}")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"tpunb: compiled programs are not kept: {place}: {error.strerror}", file=sys.stderr)
        return
    xr.initialize_cache(str(place))


def begin(device: Device, local_rank: int, local_world_size: int, spmd_cores: int | None) -> None:
    """Right before the train cell: on a TPU, start the runtime as torch_xla's launcher does.

    Not earlier, because `xr.initialize_cache` in the prelude must come before it; and not at
    all for SPMD, which the cell itself may switch on, before the first device.
    """
    if device == "TPU" and spmd_cores is not None:
        pulse.watch()
    elif device == "TPU":
        from torch_xla._internal import pjrt

        keep_compiled(local_rank, local_world_size)
        if local_world_size == 1:
            pjrt.initialize_singleprocess()
        else:
            pjrt.initialize_multiprocess(local_rank, local_world_size)
            spmd.check_devices()
        pulse.watch()


def end(device: Device, world_size: int) -> None:
    """After a train cell that ended well."""
    if device == "CPU" and world_size > 1:
        from tpunb.worker.rehearsal.install import leave

        leave()
