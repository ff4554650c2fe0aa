"""torch_xla as a `Backend`."""

from __future__ import annotations

from collections.abc import Mapping

from tpunb.backends import loader_waits
from tpunb.backends.base import RankSetup
from tpunb.backends.xla import counters, loaders, restored_names, runtime, xla_device
from tpunb.runs.heartbeat import Counts
from tpunb.runs.spec import BackendName, Device


class XlaBackend:
    """torch_xla, on a TPU or rehearsed on CPU cores. See `Backend` for the methods."""

    name: BackendName = "xla"
    modules = (
        "torch",
        "torch_xla",
        "torch_xla.core.xla_model",
        "torch_xla.distributed.parallel_loader",
        "torch_xla.distributed.xla_multiprocessing",
        "torch_xla.runtime",
        "tpunb.backends.xla.rehearsal.install_xla",
        "tpunb.backends.xla.tpu_answers",
    )
    has_programs = True

    def warm(self, device: Device) -> None:
        """The imports are all that can be done ahead; what the cells import may be of old."""
        restored_names.restore()

    def fork_problem(self) -> str | None:
        """An initialised XLA runtime does not survive a fork (measured, torch_xla 2.9)."""
        return "uses an XLA device" if runtime.is_running() else None

    def launch_environment(self, ranks: int, node_rank: int, hosts: int) -> Mapping[str, str]:
        """None: torch elastic's are enough."""
        return {}

    def prepare(self, setup: RankSetup) -> None:
        """Choose the rank's chip, or install the rehearsal; count what loops wait for."""
        xla_device.prepare_device(setup)
        runtime.start_before_backward()
        loaders.report_errors()
        loader_waits.count_waits()
        loaders.count_waits()

    def start(self, setup: RankSetup) -> None:
        """Start the runtime on a TPU."""
        xla_device.start_device(setup)

    def counts(self) -> Counts:
        """torch_xla's counters."""
        return counters.heartbeat_counts()

    def finish(self) -> None:
        """On a TPU a pending program may hold a collective that needs all ranks."""
        if (torch_xla := runtime.running_module()) is not None:
            torch_xla.sync(wait=True)


backend = XlaBackend()
