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
    gpus,
    hardware,
    machine,
    metadata,
    packages,
    prices,
    resources,
    tpu,
    tpu_users,
)
from tpunb.machine.machine import Machine
from tpunb.machine.metadata import Metadata
from tpunb.machine.packages import InstalledPackages
from tpunb.machine.problem import SetupProblem
from tpunb.machine.resources import Resources
from tpunb.machine.tpu_users import TpuUsers
from tpunb.runs.spec import BackendName, Price

# In the order in which each library checks them: kaggle 2.2.5, google-auth, huggingface_hub, wandb.
_VARIABLES: dict[str, tuple[str, ...]] = {
    "Kaggle": ("KAGGLE_API_V1_TOKEN", "KAGGLE_API_TOKEN", "KAGGLE_KEY"),
    "Google Cloud": ("GOOGLE_APPLICATION_CREDENTIALS",),
    "Hugging Face": ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    "Weights & Biases": ("WANDB_API_KEY",),
}
_FILES: dict[str, tuple[str, ...]] = {
    "Kaggle": (
        ".kaggle/access_token",
        ".kaggle/access_token.txt",
        ".kaggle/kaggle.json",
        ".config/kaggle/kaggle.json",
        ".kaggle/credentials.json",
    ),
    "Google Cloud": (".config/gcloud/application_default_credentials.json",),
    "Hugging Face": (".cache/huggingface/token",),
    "Weights & Biases": (),
}


@dataclass(frozen=True)
class Credential:
    """A credential that was found; its value is not read."""

    service: str
    place: str
    """Name of the variable, or path of the file."""
    open_to_others: bool = False
    """True for a file that other users of this machine can read."""


@dataclass(frozen=True)
class SetupReport:
    machine: Machine
    cores: int
    """Ranks of a run without `--cores`."""
    holding: TpuUsers
    packages: InstalledPackages
    room: Resources
    credentials: tuple[Credential, ...]
    problems: tuple[SetupProblem, ...]
    """Problems that must be fixed, the most severe first."""
    advice: tuple[SetupProblem, ...]
    """Problems that are good to know."""
    price: Price | None = None
    """Price of this machine per hour, if known."""
    why: str = ""
    """Why runs use `machine.backend`: 'cell [1] imports torch_tpu'; empty if it is not known."""

    def with_problem(self, problem: SetupProblem | None) -> SetupReport:
        return self if problem is None else replace(self, problems=(*self.problems, problem))

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
            "cores": self.cores,
            "core_counts": list(here.rank_counts) or None,
            "accelerator_type": here.accelerator_type,
            "generation": here.generation,
            "cores_per_chip": made.cores if made is not None else None,
            "devices_per_chip": here.devices_per_chip if here.chips else None,
            "hbm_per_chip_gib": made.hbm if made is not None else None,
            "workers": here.workers,
            "worker": here.worker,
            "spot": here.spot,
            "processors": here.processors,
            "memory": {"free": self.room.memory, "needed": self.room.needed},
            "disk": {"runs": self.room.runs, "free": self.room.disk, "shm": self.room.shm},
            "compile_cache": {"folder": self.room.cache, "size": self.room.cached},
            "seconds_left": self.room.left,
            "price": asdict(self.price) if self.price is not None else None,
            "metadata_server": here.metadata.state,
            "held_by": [
                {"pid": user.pid, "kind": user.kind, "user": user.user, "command": user.command}
                for user in self.holding.holders
            ],
            "credentials": [{"service": c.service, "place": c.place} for c in self.credentials],
            "versions": self.packages.main_versions(),
            "problems": [problem.to_json() for problem in self.problems],
            "advice": [problem.to_json() for problem in self.advice],
            "signs": list(here.signs),
        }


def inspect_machine(
    env: Mapping[str, str],
    *,
    runs: Path,
    cores: int | None = None,
    root: Path | None = None,
    path: Sequence[str] | None = None,
    python: tuple[int, ...] = (),
    imported: Mapping[str, Any] | None = None,
    answers: Metadata | None = None,
    backend: BackendName | None = None,
    why: str = "",
) -> SetupReport:
    """Inspect the whole set-up. `cores`: the user's choice, if any. `imported`: the kernel's
    modules. `answers`: the metadata server's, if it was queried before. `backend` and `why`: the
    backend of runs, and the reason for it; None: the one that the installed packages are for.

    `root`, `path` and `python` describe another machine and interpreter, for tests.
    """
    root = machine.root_of(env) if root is None else root
    request = None
    if answers is None:  # the server answers while the rest is inspected
        request = metadata.MetadataRequest(env, root, tpu.count_chips(root)[0])
    have = packages.read_installed(path, python)
    holding = tpu_users.find_tpu_users(root)
    credentials = find_credentials(env)
    if request is not None:
        answers = request.answers()
    here = machine.machine_from_metadata(env, root, answers or Metadata())
    if path is not None:
        here = replace(here, cuda=gpus.has_cuda(path))
    if backend is None:
        choice = packages.installed_backend(have)
        backend, why = choice.backend, choice.why
    here = here.with_backend(backend)
    chosen = cores or here.default_cores
    began = resources.session_began(root)
    room = resources.measure_resources(here, env, root, runs, chosen, began)

    def all_problems() -> Iterator[SetupProblem]:
        yield from hardware.hardware_problems(here, holding, env, root, chosen)
        if path is None:
            yield from packages.half_installed(here, have)
        yield from packages.package_problems(have, here, env, imported)
        yield from resources.resource_problems(room, chosen)
        yield from credential_problems(credentials)

    problems = tuple(all_problems())
    return SetupReport(
        here,
        chosen,
        holding,
        have,
        room,
        tuple(credentials),
        tuple(problem for problem in problems if problem.must),
        tuple(problem for problem in problems if not problem.must),
        prices.price_of(here),
        why,
    )


def find_credentials(env: Mapping[str, str]) -> list[Credential]:
    """The credentials that libraries would use: the first of each service."""
    home = Path(env.get("HOME", "~")).expanduser()
    credentials = (_credential(service, env, home) for service in _VARIABLES)
    return [credential for credential in credentials if credential is not None]


def _credential(service: str, env: Mapping[str, str], home: Path) -> Credential | None:
    for name in _VARIABLES[service]:
        if env.get(name):
            return Credential(service, name)
    for name in _FILES[service]:
        path = home / name
        if path.is_file():
            return Credential(service, str(path), bool(path.stat().st_mode & 0o077))
    return None


def credential_problems(credentials: list[Credential]) -> Iterator[SetupProblem]:
    """Yield a problem for each file that other users can read."""
    for credential in credentials:
        place = credential.place
        if credential.open_to_others:
            yield SetupProblem(
                "credentials-open",
                f"{place} ({credential.service}) can be read by other users of this machine.",
                f"`chmod 600 {place}`",
                must=False,
            )
