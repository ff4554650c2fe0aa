"""The report of `tpunb doctor` and `%tpu_setup`: all facts about a set-up, and its problems.

Making it opens no TPU, imports neither torch nor torch_xla, and waits `metadata.QUICK` seconds at
most for the metadata server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tpunb.machine import (
    chip_meter,
    gpus,
    hardware,
    machine,
    metadata,
    packages,
    prices,
    tpu_users,
)
from tpunb.machine.hardware import Resources
from tpunb.machine.machine import Machine
from tpunb.machine.metadata import Metadata
from tpunb.machine.packages import InstalledPackages
from tpunb.machine.problem import SetupProblem
from tpunb.machine.tpu_users import TpuUser
from tpunb.runs.chips import Chip
from tpunb.runs.spec import BackendName, Price


@dataclass(frozen=True)
class SetupReport:
    machine: Machine
    cores: int
    """Ranks of a run without `--cores`."""
    holders: tuple[TpuUser, ...]
    """Processes that use the TPU."""
    packages: InstalledPackages
    room: Resources
    problems: tuple[SetupProblem, ...]
    """Problems that must be fixed, the most severe first."""
    advice: tuple[SetupProblem, ...]
    """Problems that are good to know."""
    price: Price | None = None
    """Price of this machine per hour, if known."""
    why: str = ""
    """Why runs use `machine.backend`: 'cell [1] imports torch_tpu'; empty if it is not known."""
    gpus: tuple[Chip, ...] = ()
    """What the GPUs of a run have in use; () if that is not known, or runs do not use them."""

    def to_json(self) -> dict[str, Any]:
        here, made = self.machine, self.machine.made
        return {
            "platform": here.platform,
            "kind": here.kind,
            "backend": here.backend,
            "backend_reason": self.why,
            "device": here.device,
            "chips": here.chips,
            "gpus": here.gpus,
            "gpus_in_use": [str(gpu) for gpu in self.gpus],
            "cores": self.cores,
            "core_counts": list(here.rank_counts) or None,
            "accelerator_type": here.accelerator_type,
            "generation": here.generation,
            "hbm_per_chip_gib": made.hbm if made is not None else None,
            "workers": here.workers,
            "worker": here.worker,
            "spot": here.spot,
            "processors": here.processors,
            "memory": here.memory,
            "disk": {"runs": self.room.runs, "free": self.room.disk, "shm": self.room.shm},
            "price": asdict(self.price) if self.price is not None else None,
            "metadata_server": here.metadata.answers,
            "held_by": [
                {"pid": user.pid, "kind": user.kind, "user": user.user, "command": user.command}
                for user in self.holders
            ],
            "versions": self.packages.main_versions(),
            "problems": [problem.to_json() for problem in self.problems],
            "advice": [problem.to_json() for problem in self.advice],
        }


def inspect_machine(
    env: Mapping[str, str],
    *,
    runs: Path,
    cores: int | None = None,
    root: Path | None = None,
    path: Sequence[str] | None = None,
    imported: Mapping[str, Any] | None = None,
    answers: Metadata | None = None,
    backend: BackendName | None = None,
    why: str = "",
    cpu: bool = False,
) -> SetupReport:
    """Inspect the whole set-up. `cores`: the user's choice, if any. `imported`: the kernel's
    modules. `answers`: the metadata server's, if it was queried before. `backend` and `why`: the
    backend of runs, and the reason for it; None: the one that the installed packages are for.
    `cpu`: the notebook's code trains on the CPU (`Machine.with_backend`).

    `root` and `path` (folders of packages) describe another machine, for tests.
    """
    root = machine.root_of(env) if root is None else root
    have = packages.read_installed(path)
    holders = tuple(tpu_users.find_tpu_users(root))
    if answers is None:
        answers = metadata.read_all(env, root)
    here = machine.machine_from_metadata(env, root, answers)
    if path is not None:
        here = replace(here, cuda=gpus.has_cuda(path))
    if backend is None:
        choice = packages.installed_backend(have)
        backend, why = choice.backend, choice.why
    here = here.with_backend(backend, cpu=cpu)
    chosen = cores or here.default_cores
    room = hardware.measure_resources(root, runs)

    def all_problems() -> Iterator[SetupProblem]:
        yield from hardware.hardware_problems(here, holders, root, chosen)
        yield from packages.package_problems(have, here, imported)
        yield from hardware.resource_problems(room)

    usage: list[Chip] = []
    if here.device == "GPU":
        usage = chip_meter.meter_of_gpus(env.get(gpus.VISIBLE)).look(training=False)
    problems = tuple(all_problems())
    return SetupReport(
        here,
        chosen,
        holders,
        have,
        room,
        tuple(problem for problem in problems if problem.must),
        tuple(problem for problem in problems if not problem.must),
        prices.price_of(here),
        why,
        tuple(usage),
    )
