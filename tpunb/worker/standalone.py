"""Prepares a process for a converted script: `python script.py`, `torchrun … script.py`.

The script's header calls `prepare` if tpunb is installed. Without tpunb the script runs, too, but
without rehearsal.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tpunb.backends import current, launchers
from tpunb.backends.base import RankSetup
from tpunb.backends.choice import is_installed, require_one_host
from tpunb.backends.torchtpu.loading import AUTOLOAD
from tpunb.backends.xla import xla_device
from tpunb.runs.spec import BackendName, Device
from tpunb.utils import addresses, env_vars, one_rank, processes
from tpunb.utils.errors import MissingPackageError, SetupError
from tpunb.utils.install_commands import INSTALL_XLA
from tpunb.worker import children


def prepare(*, spmd: bool = False, backend: BackendName | None = None) -> None:
    """Set this process up like a rank of a run, as far as the script needs it.

    Under torchrun each process drives one core: of the TPU if there is one, otherwise as a
    rehearsal rank. Without torchrun the process drives one core and gets torchrun's variables; with
    `spmd` (torch_xla's mode in which one process drives all cores) it drives all cores of the TPU,
    or CPU_NUM_DEVICES rehearsal cores (4), and has no rank. Does nothing in a rank of a run, which
    is set up already. `backend`: what the script is written for; by default torch_xla where it is
    installed, otherwise torch.distributed.

    Raises MissingPackageError if torch_xla is wanted and missing, SetupError if rehearsal is not
    possible or torchrun has started several processes of an SPMD script on this host.
    """
    if env_vars.RUN in os.environ:
        return
    if not spmd:
        one_rank.set_variables()
    if backend is None:
        backend = "xla" if is_installed("torch_xla") else "torch"
    if backend == "xla":
        _prepare_xla(spmd)
    else:
        _prepare_torch(backend)
    if not processes.spawned_by_rank:
        os.environ[env_vars.SCRIPT] = os.path.abspath(
            getattr(sys.modules["__main__"], "__file__", "")
        )
        children.leave_out_train_cell()
    launchers.redirect_launchers(int(os.environ.get("RANK", "0")), spawn=_under_torchrun())


def _under_torchrun() -> bool:
    """True if torchrun has started this process; `one_rank` does not set this variable."""
    return "TORCHELASTIC_USE_AGENT_STORE" in os.environ


def _prepare_torch(backend: BackendName) -> None:
    os.environ.setdefault(env_vars.BACKEND, backend)
    os.environ.setdefault(env_vars.DEVICE, _device_of(backend))
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
    alone = dict(zip(names, (0, 1, 0, 1), strict=True))
    numbers = {name: int(os.environ[name]) for name in names} if _under_torchrun() else alone
    found = current.backend()
    found.warm(current.device())
    found.prepare(RankSetup(current.device(), *numbers.values()))
    found.start(RankSetup(current.device(), *numbers.values()))


def _device_of(backend: BackendName) -> Device:
    """The device of this machine: a TPU is one for torch_tpu if /dev/vfio has its chips."""
    if backend == "torchtpu":
        if is_installed("torch_tpu") and list(Path("/dev/vfio").glob("[0-9]*")):
            return "TPU"
        os.environ[AUTOLOAD] = "0"
        return "CPU"
    import torch

    return "GPU" if torch.cuda.is_available() else "CPU"


def _prepare_xla(spmd: bool) -> None:
    _import_torch_xla()
    under_torchrun = _under_torchrun()
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if under_torchrun else 1
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun else 1
    if os.environ["PJRT_DEVICE"] == "CPU":
        require_one_host("xla", "CPU", world_size // local_world_size)
    if spmd:
        _one_process()
    elif world_size > 1:
        local_rank = int(os.environ["LOCAL_RANK"])
        if os.environ["PJRT_DEVICE"] == "TPU":
            if local_world_size < world_size:
                addresses.bind_gloo(os.environ)
            xla_device.take_chip(local_rank, local_world_size, world_size)
            xla_device.start_runtime_with_others()
        elif os.environ["PJRT_DEVICE"] == "CPU":
            from tpunb.backends.xla.rehearsal.install_xla import install_rehearsal
            from tpunb.backends.xla.spmd import refuse_in_ranks

            install_rehearsal(int(os.environ["RANK"]), world_size)
            refuse_in_ranks()
    from tpunb.backends.xla import loaders, runtime, tpu_answers

    if os.environ["PJRT_DEVICE"] == "CPU":
        tpu_answers.answer_as_tpu(local_world_size)
    runtime.start_before_backward()
    loaders.report_errors()


def _one_process() -> None:
    """For SPMD: several devices on CPU, and no other process on this host."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if processes != "1":
        raise SetupError(
            f"torchrun has started {processes} processes of this script on this host, but the "
            "script uses SPMD, in which one process drives all cores of a host: start it with "
            "`python script.py`"
        )
    if os.environ["PJRT_DEVICE"] == "CPU":
        from tpunb.backends.xla import spmd

        os.environ.setdefault("CPU_NUM_DEVICES", "4")
        spmd.prepare_spmd()


def _import_torch_xla() -> None:
    """Import torch_xla and choose the device, unless the user has: the TPU if there is one.

    torch_xla's own choice is turned off, because it prints a warning.
    """
    chosen = "PJRT_DEVICE" in os.environ
    own_choice = "PJRT_SELECT_DEFAULT_DEVICE"
    silenced = not chosen and own_choice not in os.environ
    if silenced:
        os.environ[own_choice] = "0"
    try:
        import torch_xla.runtime  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch_xla":
            raise
        raise MissingPackageError("torch_xla", "this script", INSTALL_XLA) from None
    finally:
        if silenced:
            del os.environ[own_choice]
    if not chosen:
        os.environ["PJRT_DEVICE"] = "TPU" if xla_device.count_chips() > 0 else "CPU"
