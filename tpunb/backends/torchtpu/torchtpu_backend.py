"""TorchTPU as a `Backend`: `torch.device("tpu")`, on a TPU or rehearsed on CPU cores."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from tpunb.backends import current
from tpunb.backends.base import RankSetup
from tpunb.backends.choice import require_one_host
from tpunb.backends.torch.torch_backend import TorchBackend
from tpunb.backends.torchtpu import launch_variables
from tpunb.runs.spec import BackendName, Device

_DEVICE = "tpunb.backends.torchtpu.rehearsal.rehearsed_device"
_GROUPS = "tpunb.backends.torchtpu.rehearsal.tpu_dist"


class TorchTpuBackend(TorchBackend):
    """TorchTPU. See `Backend` for the methods."""

    name: BackendName = "torchtpu"

    def warm(self, device: Device) -> None:
        """Without a TPU, install the rehearsed device; on one, torch has loaded torch_tpu."""
        super().warm(device)
        if device == "CPU":
            importlib.import_module(_DEVICE).install()
            importlib.import_module(_GROUPS).install_process_groups()  # for one rank, too

    def fork_problem(self) -> str | None:
        """An opened TPU does not survive a fork. A rehearsed one does: it has no state."""
        tpu: Any = sys.modules.get("torch.tpu")
        if tpu is None or importlib.import_module(_DEVICE).is_installed():
            return super().fork_problem()
        return "uses the TPU" if tpu.is_initialized() else super().fork_problem()

    def launch_environment(self, ranks: int, node_rank: int, hosts: int) -> Mapping[str, str]:
        """On a TPU, what torch_tpu's set_tpu_launch_env makes: ports and topology."""
        if current.device() != "TPU":
            return {}
        names = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if hosts > 1 else ()
        return launch_variables.launch_environment(os.environ, ranks, node_rank, names)

    def rehearse(self, setup: RankSetup) -> None:
        """Compare the collectives of tensors on "tpu" and on the CPU."""
        require_one_host(self.name, setup.device, setup.hosts)
        importlib.import_module(_GROUPS).install_rehearsal(setup.rank, setup.world_size)

    def start(self, setup: RankSetup) -> None:
        """Do nothing: torch_tpu opens the TPU at its first use."""

    def finish(self) -> None:
        """Wait for the TPU's pending work."""
        torch: Any = sys.modules["torch"]
        if (tpu := sys.modules.get("torch.tpu")) is not None and tpu.is_initialized():
            torch.accelerator.synchronize()


backend = TorchTpuBackend()
