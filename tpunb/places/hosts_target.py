"""`HostsTarget`: the hosts of a place that have answered and can take a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeAlias

from tpunb.machine.environment import EnvChange
from tpunb.machine.machine import Machine
from tpunb.places import check, transfer
from tpunb.places.check import HostsReport, quote
from tpunb.places.config import PlaceConfig, find_hosts_place
from tpunb.places.errors import HostsError, list_hosts
from tpunb.places.place import HostsRun, place_of
from tpunb.places.target import LocalTarget
from tpunb.places.transport import Transport, make_transport
from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import NodeCommand, Pod, StartNode
from tpunb.runs.spec import Price, RunSpec
from tpunb.utils.errors import TpunbError
from tpunb.utils.tools import StoppedError

_SAVES = re.compile(r"\btpunb\.(?:save|load)\b")


@dataclass(frozen=True)
class HostsTarget:
    """The hosts of a place, in order of node rank, which have answered and fit each other."""

    place: PlaceConfig
    report: HostsReport
    transport: Transport
    """The way to the hosts, in the same order."""
    root: Path
    """The local folder from which files are copied."""
    cwd: Path
    """The local working directory: `root` or a folder below it."""
    kernel: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Hosts have an environment of their own."""

    @property
    def place_name(self) -> str:
        return self.place.name

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.report.names

    @property
    def price(self) -> Price | None:
        return self.report.first.price  # that of the whole slice

    def machine(self, here: Machine) -> Machine:
        host = self.report.first.machine
        return replace(
            here,
            platform=self.place.kind,
            kind=f"place {self.place.name}",
            device=host.device,
            generation="",
            workers=len(self.hosts),
            chips=host.chips,
            accelerator_type=host.accelerator_type,
            memory=host.memory or here.memory,
        )

    def choose_cores(self, wanted: int | str | None) -> int:
        hosts, local = len(self.hosts), self.report.local_cores
        if wanted in (None, "all"):
            return hosts * local
        cores = int(wanted or 0)
        if cores % hosts or not cores:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts} hosts with the same number "
                f"of ranks each, so --cores must be a multiple of {hosts}"
            )
        if self.report.first.machine.device == "TPU" and cores != hosts * local:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts * local} chips, which start "
                "together or not at all (--cores all)"
            )
        return cores

    def environment(self, asked: Mapping[str, str]) -> tuple[dict[str, str], tuple[EnvChange, ...]]:
        return dict(asked), ()

    def checkpoints(self, run_id: str) -> str:
        return self.place.checkpoints(run_id)

    @property
    def work(self) -> str:
        """The hosts' folder for the files of `root`."""
        key = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.-]", "-", self.root.name) or "root"
        return f"{self.place.host_settings.folder.rstrip('/')}/projects/{name}-{key}"

    def _there(self, path: Path) -> str | None:
        """The hosts' path for a local one; None for a path that is not copied."""
        if not path.is_relative_to(self.root):
            return None
        return f"{self.work}/{path.relative_to(self.root).as_posix()}".removesuffix("/.")

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return only entries of `sys.path` that are copied; the hosts' own packages follow."""
        local = [self.cwd, *(Path(entry or self.cwd).absolute() for entry in entries)]
        own = [self._there(path) for path in local if "site-packages" not in path.parts]
        copied = [path for path in own if path is not None]
        return copied[0], tuple(dict.fromkeys(copied))

    def folder(self, path: str) -> str:
        return (path and self._there(Path(path))) or path

    def resume(self, run: RunDir) -> str:
        place = place_of(run)
        shared = "" if place is None else place.checkpoints(run.id)
        if not (shared or (place is not None and len(self.hosts) == 1)):
            raise TpunbError(
                f"not all hosts of {self.place.name} can read the checkpoints of run {run.id}: "
                f"name a folder that they share, or a URL, as `checkpoints` of "
                f"[places.{self.place.name}], or give one with --resume"
            )
        return shared or f"{HostsRun.read(run).folders[0]}/checkpoints"

    def notes(self, script: str) -> list[str]:
        shared = self.place.host_settings.checkpoints
        if shared or len(self.hosts) == 1 or not _SAVES.search(script):
            return []
        return [
            "each host keeps its own checkpoints, and rank 0's are on "
            f"{self.hosts[0]} only: to resume, name a folder that all hosts share, or a URL, "
            f"as `checkpoints` of [places.{self.place.name}]",
        ]

    def placed(self, run_id: str) -> HostsRun:
        """Decide where a new run will be."""
        reports = [host for _, host in self.report.answered]
        return HostsRun(
            self.place,
            self.transport.hosts,
            tuple(host.address for host in reports),
            tuple(f"{host.folder}/runs/{run_id}" for host in reports),
            quote(self.place.host_settings.python),
            self.place.host_settings.port,
            str(self.root),
            self.work,
        )

    def pod(self, run: RunDir, spec: RunSpec, placed: HostsRun, env: Mapping[str, str]) -> Pod:
        """The commands for a run's supervisor; `env`: variables for the ranks."""
        nodes = tuple(
            NodeCommand(
                tuple(self.transport.command(host, f"cd / && exec {placed.python} -m tpunb node")),
                StartNode(folder, dict(env), host, placed.addresses[host], placed.port),
            )
            for host, folder in enumerate(placed.folders)
        )
        fetched = bool(spec.returns) or spec.profile is not None
        return Pod(
            nodes, transfer.command("send", run), transfer.command("fetch", run) if fetched else ()
        )


Target: TypeAlias = LocalTarget | HostsTarget
"""What takes a run; `LocalTarget` describes its attributes and methods."""


def find_hosts(
    name: str, cwd: Path, say: Callable[[str], None], cancelled: Callable[[], bool]
) -> HostsTarget:
    """Query the hosts of the place `name`, and compare them; `say` is called with progress.

    Raises PlaceError, HostsError for hosts that do not answer or do not fit, and TpunbError if
    `cancelled` returns True or the interrupt key is pressed.
    """
    place = find_hosts_place(name, cwd)
    say(f"looking for the hosts of place {name}")  # queries gcloud
    try:
        transport = make_transport(place)
        hosts = list_hosts([target.rpartition("@")[2] for target in transport.hosts])
        say(f"waiting for the hosts of place {name} to answer: {hosts}")
        report = check.ask(place, transport, cancelled=cancelled)
        if cancelled():
            raise StoppedError
    except StoppedError:
        raise TpunbError("interrupted before the run began: nothing was started") from None
    if problems := report.problems():
        raise HostsError(name, tuple(problems))
    say(f"the hosts of place {name} have answered: {hosts}")
    return HostsTarget(place, report, transport, place.root(cwd), cwd)
