"""Plain torch.distributed as a `Backend`: gloo on processors, nccl on CUDA devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from tpunb.backends import loader_waits
from tpunb.backends.base import RankSetup
from tpunb.backends.rehearsal import install
from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.c10d_stores import ProcessGroupStores
from tpunb.backends.torch import accelerators, exchanges
from tpunb.backends.torch.steps import steps
from tpunb.runs.heartbeat import Counts
from tpunb.runs.spec import BackendName, Device
from tpunb.utils import addresses


class TorchBackend:
    """torch.distributed alone. See `Backend` for the methods."""

    name: BackendName = "torch"
    modules: tuple[str, ...] = (
        *("torch", "torch.distributed", "torch.optim"),
        "torch._dynamo",  # the first optimizer imports it, which takes 2 s
        "tpunb.backends.rehearsal.install",
    )
    has_programs = False

    def warm(self, device: Device) -> None:
        """Watch for what a prelude makes that counts processes; the imports are done."""
        accelerators.note_made()

    def fork_problem(self) -> str | None:
        """CUDA does not survive a fork: the child cannot initialise it again. Nor do counts."""
        torch: Any = sys.modules["torch"]
        return "uses a GPU" if torch.cuda.is_initialized() else accelerators.fork_problem()

    def launch_environment(self, ranks: int, node_rank: int, hosts: int) -> Mapping[str, str]:
        """None: torch elastic's are enough."""
        return {}

    def prepare(self, setup: RankSetup) -> None:
        """On the CPU of one host, have ranks compare their collectives. Count steps and waits.

        Each rank sees all GPUs, and takes that of its LOCAL_RANK.
        """
        if setup.hosts > 1:
            addresses.bind_gloo(os.environ)
        if setup.world_size > 1:
            exchanges.watch_exchanges()
            if setup.device == "CPU":
                self.rehearse(setup)
        accelerators.watch_accelerators(self.name, setup)
        steps.watch()
        loader_waits.count_waits()

    def rehearse(self, setup: RankSetup) -> None:
        """Install what only several ranks on the CPU have."""
        if setup.hosts == 1:
            install.install_rehearsal(setup.rank, setup.world_size)
        else:
            agent = Agent.from_environment(setup.rank, setup.world_size, hosts=setup.hosts)
            ProcessGroupStores(agent, None).install()

    def start(self, setup: RankSetup) -> None:
        """Choose this rank's GPU for code that says "cuda" without a number."""
        if setup.device == "GPU":
            sys.modules["torch"].cuda.set_device(setup.local_rank)

    def counts(self) -> Counts:
        """Optimizer steps and compilations."""
        return steps.counts()

    def finish(self) -> None:
        """Wait for the GPU's pending work."""
        torch: Any = sys.modules["torch"]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()


backend = TorchBackend()
