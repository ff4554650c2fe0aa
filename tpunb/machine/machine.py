"""`Machine`: platform, device and cores, read from files and variables without opening a TPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tpunb.machine import gpus, metadata, tpu
from tpunb.machine.metadata import Metadata
from tpunb.machine.platform import find_platform
from tpunb.machine.tpu import GENERATIONS, Generation
from tpunb.runs.spec import BackendName, Device
from tpunb.utils import cpus, env_vars, memory

REHEARSAL_CORES = 4
"""The most rehearsal ranks of a run without `--cores`."""
RANK_MEMORY = 250 * 2**20
"""Least bytes that a rehearsal rank needs once torch_xla's runtime has started (measured)."""


@dataclass(frozen=True)
class Machine:
    """Facts about this machine, or about one host of a slice."""

    platform: str
    """See `platform.Platform.name`."""
    device: Device
    """The device of ranks."""
    chips: int
    """TPU chips of this host; 0 without a TPU."""
    generation: str
    """'v5e', …; empty without a TPU."""
    processors: int
    memory: int
    """Free bytes for new processes."""
    kind: str = "this machine"
    """See `platform.Platform.kind`."""
    accelerator_type: str = ""
    """'v5litepod-16': that of the whole slice to which this host belongs; empty if unknown."""
    workers: int = 1
    """Hosts of the slice."""
    worker: int = 0
    """This host's number among them."""
    spot: bool | None = None
    """Whether the machine can be preempted at any time; None if unknown."""
    metadata: Metadata = field(default_factory=Metadata)
    """The metadata server's answers."""
    backend: BackendName = "xla"
    """The backend that `device` and the numbers of ranks are for; see `with_backend`."""
    gpus: int = 0
    """CUDA devices that processes may use."""
    cuda: bool = True
    """False if the installed torch was built for the CPU only, and cannot use them."""
    vfio_chips: int = 0
    """See `tpu.count_vfio_chips`."""
    pjrt_device: str = ""
    """PJRT_DEVICE, which decides between TPU and CPU for the backend xla only; '' if not set."""

    def with_backend(self, backend: BackendName, *, cpu: bool = False) -> Machine:
        """This machine as `backend` sees it: with the device on which its ranks run.

        `cpu`: the code names the CPU, which the backend torch leaves to it.
        """
        if backend == self.backend:
            return self
        device: Device = "CPU"
        if backend == "torch" and self.gpus and self.cuda and not cpu:
            device = "GPU"
        elif backend == "torchtpu" and self.vfio_chips:
            device = "TPU"
        elif backend == "xla":
            device = _device_of_xla(self.pjrt_device, self.chips)
        return replace(self, backend=backend, device=device)

    @property
    def made(self) -> Generation | None:
        """The properties of this generation; None without a TPU, or if it may be v2 or v3."""
        return GENERATIONS.get(self.generation)

    @property
    def devices_per_chip(self) -> int:
        """Devices that the backend finds in a process with one chip."""
        if self.backend == "torchtpu":
            return tpu.TORCH_TPU_DEVICES.get(self.generation, 1)
        if self.generation == tpu.V2_OR_V3:
            return 2
        return self.made.devices if self.made is not None else 1

    @property
    def rank_counts(self) -> tuple[int, ...]:
        """Numbers of ranks that the TPU of this host can have, in order; () if it is not used."""
        if self.device != "TPU":
            return ()
        if self.backend == "torchtpu":
            return self._torchtpu_counts[:1] if self.workers > 1 else self._torchtpu_counts
        alone = self.devices_per_chip > 1 or self.workers > 1
        return (1,) if alone or self.chips <= 1 else (1, self.chips)

    @property
    def _torchtpu_counts(self) -> tuple[int, ...]:
        counts = tpu.TORCH_TPU_RANKS.get(self.generation, ())
        return tuple(one for one in counts if one <= self.chips * self.devices_per_chip)

    @property
    def default_cores(self) -> int:
        """Ranks of a run without `--cores`."""
        if self.device == "GPU":
            return self.gpus
        if self.device == "CPU":
            return max(2, min(REHEARSAL_CORES, self.processors))
        if self.backend == "torchtpu":
            return max(self._torchtpu_counts, default=1)
        return max(1, self.chips) if self.devices_per_chip == 1 else 1

    @property
    def most_rehearsal_cores(self) -> int:
        """Ranks that fit into memory, however slowly they run."""
        return max(REHEARSAL_CORES, min(256, self.memory // RANK_MEMORY))

    def check_cores(self, cores: int) -> str | None:
        """Explain why this many ranks cannot run, and how many can; None if they can."""
        if cores < 1:
            return f"{cores} cores: at least 1 is needed"
        if (why := self.why_not_torchtpu()) is not None:
            return f"{cores} cores: {why}"
        problem = {"TPU": self._on_tpu, "GPU": self._on_gpus, "CPU": self._on_cpu}[self.device]
        why = problem(cores)
        return None if why is None else f"{cores} cores: {why}"

    def _on_tpu(self, cores: int) -> str | None:
        if cores in self.rank_counts:
            return None
        if self.backend == "xla" and self.devices_per_chip > 1:
            return self.why_one_rank()
        if self.workers > 1:
            return self.why_this_host_alone()
        if self.backend == "xla":
            return (
                f"this TPU has {self.chips} chips, and torch_xla runs on 1 "
                "or on all of them (--cores 1 or --cores all)"
            )
        ranks = "rank" if self.rank_counts == (1,) else "ranks"
        return (
            f"torch_tpu starts {self.name_rank_counts()} {ranks} on this host, which has "
            f"{self.chips} TPU {self.generation} chips (--cores all: {self.default_cores})"
        )

    def _on_gpus(self, cores: int) -> str | None:
        if cores <= self.gpus:
            return None
        have = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return (
            f"processes on this machine may use {have}, and each rank needs its own "
            f"({gpus.VISIBLE} can leave some out). To run on the CPU, make the process group with "
            f"gloo and name no GPU, or set {gpus.VISIBLE}=''"
        )

    def _on_cpu(self, cores: int) -> str | None:
        if cores <= self.most_rehearsal_cores:
            return None
        return (
            f"at most {self.most_rehearsal_cores} rehearsal ranks fit into "
            f"the {self.memory / 2**30:.0f} GiB of free memory (each needs at least "
            f"{RANK_MEMORY / 2**30:.2f} GiB). A TPU host has 1, 4 or 8 cores."
        )

    def name_rank_counts(self) -> str:
        """'1, 4 or 8': the numbers of ranks that the TPU of this host can have."""
        *first, last = map(str, self.rank_counts)
        return f"{', '.join(first)} or {last}" if first else last

    def why_not_torchtpu(self) -> str | None:
        """Explain why TorchTPU has no support for this machine's TPU; None if it has."""
        if self.backend != "torchtpu" or not self.chips:
            return None
        if self.generation in tpu.TORCH_TPU_RANKS:
            return None
        return f"TorchTPU does not support TPU {self.generation}; torch_xla (the backend xla) does"

    def why_one_rank(self) -> str:
        """Explain why a run on this generation of TPU can have one rank only."""
        return (
            f"a TPU {self.generation} gives each process {self.devices_per_chip} devices, which "
            "torch_xla drives from threads of one process. A rank of tpunb is a process with one "
            "device, as under torchrun, which torch_xla does not support on this TPU either. Use "
            "--cores 1 (one core of the TPU), a rehearsal on CPU (PJRT_DEVICE=CPU), or a TPU v4, "
            "v5e, v5p or v6e"
        )

    def why_this_host_alone(self) -> str:
        """Explain why ranks on all chips of one host of a larger slice cannot start."""
        return (
            f"this is host {self.worker} of the {self.workers} of a {self.accelerator_type}. Its "
            "chips start only together with those of the other hosts, and tpunb starts ranks on "
            f"this host only. Use --cores {self.rank_counts[0]} (one chip), or a slice of one host"
        )


def root_of(env: Mapping[str, str]) -> Path:
    """Root folder of this machine's files: /, or TPUNB_ROOT."""
    return Path(env.get(env_vars.ROOT, "/"))


def detect_machine(
    env: Mapping[str, str], root: Path | None = None, patience: float = metadata.QUICK
) -> Machine:
    """Detect this machine's platform, device and cores. `env`: the environment of the session.

    If the user has set PJRT_DEVICE, it decides between TPU and CPU. A metadata server, where one
    is possible, is waited for `patience` seconds. The machine is that of the backend xla;
    `with_backend` has those of the others.
    """
    root = root_of(env) if root is None else root
    return machine_from_metadata(env, root, metadata.read_all(env, root, patience))


def machine_from_metadata(env: Mapping[str, str], root: Path, answers: Metadata) -> Machine:
    count, generation = tpu.count_chips(root)
    wanted = env.get("PJRT_DEVICE", "")
    named = _accelerator_type(env, answers, generation)
    if (parsed := tpu.parse_accelerator_type(named)) is not None and count:
        generation = parsed[0].name  # the bus cannot distinguish v2 from v3
    platform = find_platform(env, root, answers, count)
    hosts = [host for host in _hosts(env, answers) if host]
    number = env.get("TPU_WORKER_ID") or answers.values.get("agent-worker-number", "0")
    spot = answers.values.get("preemptible")
    return Machine(
        platform=platform.name,
        device=_device_of_xla(wanted, count),
        chips=count,
        generation=generation,
        processors=len(cpus.allowed_cpus()),
        memory=memory.available_memory(root) or 0,
        kind=platform.kind,
        accelerator_type=named or tpu.type_of(generation, count),
        workers=max(1, len(hosts)),
        worker=int(number) if number.isdecimal() else 0,
        spot=None if spot is None else spot.upper() == "TRUE",
        metadata=answers,
        gpus=gpus.count_gpus(env, root),
        cuda=gpus.has_cuda(sys.path),
        vfio_chips=tpu.count_vfio_chips(root),
        pjrt_device=wanted,
    )


def _device_of_xla(wanted: str, chips: int) -> Device:
    return "TPU" if wanted == "TPU" or (chips and wanted != "CPU") else "CPU"


def _accelerator_type(env: Mapping[str, str], answers: Metadata, generation: str) -> str:
    """`generation`: from the PCI bus, for GKE containers whose variables give the topology only."""
    named = env.get("TPU_ACCELERATOR_TYPE", "")
    if tpu.parse_accelerator_type(named) is None:
        named = tpu.type_of_slice(named or generation, env.get("TPU_TOPOLOGY", "")) or named
    return (
        named
        or answers.values.get("accelerator-type")
        or answers.tpu_env.get("ACCELERATOR_TYPE", "")
    )


def _hosts(env: Mapping[str, str], answers: Metadata) -> list[str]:
    if "TPU_WORKER_HOSTNAMES" in env:
        return env["TPU_WORKER_HOSTNAMES"].split(",")
    return answers.values.get("worker-network-endpoints", "").split(",")
