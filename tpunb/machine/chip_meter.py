"""Measures memory and load of this host's chips or GPUs during a run.

    python -c … RUN DEVICE PORTS PARENT     (in place of PORTS: CUDA_VISIBLE_DEVICES, or "all")

A separate process, which the supervisor starts and ends: gRPC starts threads and may block, and a
supervisor must do neither. libtpu serves the numbers on ports of this machine, one for each process
that has chips (TPU_RUNTIME_METRICS_PORTS, by default 8431); they are read with tpu-info's library
(0.14). GPUs are measured with NVIDIA's library (nvidia-ml-py). All is written as
`tpunb.runs.chips` describes; without a server, library or driver nothing is.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from tpunb.runs import chips, heartbeat
from tpunb.runs.chips import Chip
from tpunb.runs.directory import RunDir
from tpunb.utils import patience, processes

EVERY = 2.0
"""Seconds between two measurements. libtpu's duty cycle covers the last seconds."""
_UNHEARD = 10.0
"""Seconds between two measurements while no port has answered yet."""
PATIENCE = 5.0
"""Seconds that all ports together have to answer: tpu-info's library sets gRPC no deadline."""


class ChipUsage(NamedTuple):
    """Memory in bytes and duty cycle in per cent of one device."""

    memory: int
    total: int
    duty: float


Ask = Callable[[int], Iterable[ChipUsage]]
"""Returns the usage of a port's devices; raises ConnectionError if no server answers."""


class ChipMeter:
    """Measures the chips of one host over the time of a run."""

    def __init__(
        self,
        ports: Sequence[int],
        ask: Ask,
        within: float = PATIENCE,
        kind: Literal["chip", "GPU"] = "chip",
    ) -> None:
        self._ports = ports
        self._kind = kind
        self._ask = ask
        self._within = within
        self._calls: dict[int, futures.Future[list[ChipUsage]]] = {}
        """Unanswered queries, keyed by process: the index of its port."""
        self._peaks: dict[tuple[int, int], int] = {}
        """Peak memory, keyed by process and the device's index in it."""
        self._busy: dict[tuple[int, int], tuple[float, int]] = {}
        """Sum and number of the duty cycles measured while the train cell ran."""
        self._newest: dict[tuple[int, int], ChipUsage] = {}

    def look(self, *, training: bool) -> list[Chip]:
        """Measure; return the chips' current and past usage, [] before a port has answered.

        Devices of a port that stops answering, or does not answer in time, have usage 0.
        """
        for process, usages in enumerate(self._answers()):
            for key in [key for key in self._newest if key[0] == process]:
                self._newest[key] = ChipUsage(0, self._newest[key].total, 0.0)
            for index, usage in enumerate(usages):
                key = process, index
                self._newest[key] = usage
                self._peaks[key] = max(self._peaks.get(key, 0), usage.memory)
                if training:
                    total, looks = self._busy.get(key, (0.0, 0))
                    self._busy[key] = total + usage.duty, looks + 1
        return [
            Chip(
                number,
                *self._newest[key],
                self._peaks.get(key, 0),
                self._mean(key),
                kind=self._kind,
            )
            for number, key in enumerate(sorted(self._newest))
        ]

    def _answers(self) -> list[list[ChipUsage]]:
        """The answer of each port, [] if it gives none. A port that hangs gets no second query."""
        for process, port in enumerate(self._ports):
            if process not in self._calls:
                self._calls[process] = patience.start(partial(self._ask_port, port))
        futures.wait(self._calls.values(), self._within)
        answered = {p: call for p, call in self._calls.items() if call.done()}
        self._calls = {p: call for p, call in self._calls.items() if p not in answered}
        return [answered[p].result() if p in answered else [] for p in range(len(self._ports))]

    def _ask_port(self, port: int) -> list[ChipUsage]:
        try:
            return list(self._ask(port))
        except ConnectionError:
            return []

    def _mean(self, key: tuple[int, int]) -> float | None:
        total, looks = self._busy.get(key, (0.0, 0))
        return total / looks if looks else None


def ask_libtpu(port: int) -> list[ChipUsage]:
    """Usage of the devices of the process whose libtpu serves this port of this machine."""
    import grpc
    from tpu_info import device, metrics

    # On v2, v3 and v7x libtpu reports memory for each of a chip's two devices.
    kind = device.get_local_chips()[0] or device.TpuChip.V5E
    try:
        usages = metrics.get_chip_usage(kind, f"localhost:{port}")
    except (grpc.RpcError, AssertionError) as error:  # AssertionError: not all chips have values
        raise ConnectionError(f"port {port} does not answer") from error
    return [ChipUsage(each.memory_usage, each.total_memory, each.duty_cycle_pct) for each in usages]


def meter_of_gpus(visible: str | None) -> ChipMeter:
    """A meter for the GPUs that CUDA_VISIBLE_DEVICES leaves; None: all."""
    return ChipMeter([0], lambda _: ask_nvml(visible), kind="GPU")


def ask_nvml(visible: str | None) -> list[ChipUsage]:
    """Usage of these GPUs; [] without the library, a driver, or values for one of them.

    By number they are in the order of the bus; CUDA's own is another one where they differ in kind.
    """
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except (ImportError, OSError):
        return []
    except nvml.NVMLError:  # no driver
        return []
    usages = []
    try:
        count = nvml.nvmlDeviceGetCount()
        for entry in map(str, range(count)) if visible is None else visible.split(","):
            by_number = entry.strip().isdecimal()
            find = nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID
            handle = find(int(entry) if by_number else entry.strip())
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            load = nvml.nvmlDeviceGetUtilizationRates(handle)
            usages.append(ChipUsage(memory.used, memory.total, float(load.gpu)))
    except nvml.NVMLError:  # a part of a GPU (MIG) has no load of its own
        return []
    finally:
        nvml.nvmlShutdown()
    return usages


def parse_ports(text: str) -> list[int]:
    """The ports of TPU_RUNTIME_METRICS_PORTS ('8431,8432'); libtpu's default if it has none."""
    ports = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    return ports or [8431]


def is_training(run: RunDir) -> bool:
    """True if a rank of this host is in its train cell."""
    attempts = sorted((run.path / "attempts").glob("[0-9]*"), key=lambda path: int(path.name))
    pulses = attempts[-1].glob("*/pulse") if attempts else ()
    return any(last.train for pulse in pulses if (last := heartbeat.read_heartbeat(pulse)))


def main() -> None:
    """Measure until standard input, the supervisor's end of a pipe, closes."""
    folder, device, ports, parent = sys.argv[1:]
    processes.die_with_parent(int(parent))
    processes.set_title("chip meter")
    os.nice(10)
    os.environ["GRPC_VERBOSITY"] = "NONE"
    run, meter = RunDir(folder), ChipMeter(parse_ports(ports), ask_libtpu)
    if device == "GPU":
        meter = meter_of_gpus(None if ports == "all" else ports)
    measure(run, meter, lambda seconds: not select.select([0], [], [], seconds)[0])


def measure(run: RunDir, meter: ChipMeter, wait: Callable[[float], bool]) -> None:
    """Measure and write until `wait`, called with seconds, returns False: the run is over."""
    while True:
        began = time.monotonic()
        if found := meter.look(training=is_training(run)):
            with contextlib.suppress(OSError):  # a full disk, a folder that is gone
                chips.write_chips(Path(run.path), found)
        every = EVERY if found else _UNHEARD
        if not wait(max(0.0, every - (time.monotonic() - began))):
            return
