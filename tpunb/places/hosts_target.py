"""`HostsTarget`: the hosts of a place that have answered and can take a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tpunb.machine.machine import Machine
from tpunb.places import check, environment
from tpunb.places.check import HostsReport, interpreter
from tpunb.places.config import PlaceConfig
from tpunb.places.errors import HostsError, PlaceError, list_hosts
from tpunb.places.place import Cancelled, Check, HostsRun, Say, place_of
from tpunb.places.target import Estimate, Target
from tpunb.places.transport import make_transport
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device
from tpunb.utils.errors import TpunbError

_SAVES = re.compile(r"\btpunb\.(?:save|load)\b")


@dataclass(frozen=True)
class HostsTarget(Target):
    """The hosts of a place, in order of node rank, which have answered and fit each other."""

    place: PlaceConfig
    report: HostsReport
    targets: tuple[str, ...]
    """The transport's names of the hosts."""
    root: Path
    """The local folder from which files are copied."""
    cwd: Path
    """The local working directory: `root` or a folder below it."""

    @property
    def place_name(self) -> str:
        return self.place.name

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.report.names

    @property
    def device(self) -> Device:
        return self.report.device

    @property
    def local_cores(self) -> int:
        return self.report.local_cores

    def machine(self, here: Machine) -> Machine:
        host = self.report.answered[0][1].machine
        return replace(
            here,
            platform=self.place.kind,
            kind=f"place {self.place.name}",
            device=self.device,
            generation="",
            workers=len(self.hosts),
            chips=host.chips,
            accelerator_type=host.accelerator_type,
            memory=host.memory or here.memory,
        )

    def choose_cores(self, wanted: int | str | None) -> int:
        hosts, local = len(self.hosts), self.local_cores
        if wanted in (None, "all"):
            return hosts * local
        cores = int(wanted or 0)
        if cores % hosts or not cores:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts} hosts with the same number "
                f"of ranks each, so --cores must be a multiple of {hosts}"
            )
        if self.device == "TPU" and cores != hosts * local:
            raise ValueError(
                f"{cores} cores: place {self.place.name} has {hosts * local} chips, which start "
                "together or not at all (--cores all)"
            )
        return cores

    def checkpoints(self, run_id: str) -> str | None:
        return self.place.checkpoints(run_id) or None

    @property
    def work(self) -> str:
        """The hosts' folder for the files of `root`."""
        key = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        name = re.sub(r"[^\w.-]", "-", self.root.name) or "root"
        return f"{self.place.host_settings.folder.rstrip('/')}/projects/{name}-{key}"

    def there(self, path: Path) -> str | None:
        """The hosts' path for a local path; None for a path that is not copied."""
        if not path.is_relative_to(self.root):
            return None
        inside = path.relative_to(self.root).as_posix()
        return self.work if inside == "." else f"{self.work}/{inside}"

    def paths(self, entries: Sequence[str]) -> tuple[str, tuple[str, ...]]:
        """Return only entries of `sys.path` that are copied; the hosts' own packages follow."""
        cwd = self.there(self.cwd)
        own = [self.there(Path(entry or self.cwd).absolute()) for entry in entries]
        path = dict.fromkeys(
            entry for entry in (cwd, *own) if entry is not None and "/site-packages" not in entry
        )
        return cwd or self.work, tuple(path)

    def folder(self, path: str) -> str:
        return (path and self.there(Path(path))) or path

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

    @property
    def estimate(self) -> Estimate:
        price = self.report.price
        known = price is not None or self.device == "CPU"
        unknown = "" if known else f"the price list does not cover the hosts of {self.place.name}"
        return Estimate(price, unknown)

    @property
    def ask_above(self) -> float | None:
        return self.place.host_settings.ask_above

    def notes(self, script: str) -> list[str]:
        known = [f"{host}: {what}" for host, what in self.report.notes()]
        shared = self.place.host_settings.checkpoints
        if shared or len(self.hosts) == 1 or not _SAVES.search(script):
            return known
        return [
            *known,
            "each host keeps its own checkpoints, and rank 0's are on "
            f"{self.hosts[0]} only: to resume, name a folder that all hosts share, or a URL, "
            f"as `checkpoints` of [places.{self.place.name}]",
        ]

    def placed(self, run_id: str, *, detached: bool) -> HostsRun:
        """Decide where a new run will be. Raises PlaceError if the place cannot take it."""
        port = self.report.rendezvous_port()
        if port is None:
            raise PlaceError(
                f"port {self.place.host_settings.port} and the next ones are in use on "
                f"{self.hosts[0]}: name another `port` in [places.{self.place.name}]",
                self.place.file,
                f"places.{self.place.name}.port",
            )
        reports = [host for _, host in self.report.answered]
        return HostsRun(
            self.place,
            self.targets,
            tuple(host.address for host in reports),
            tuple(f"{host.folder}/runs/{run_id}" for host in reports),
            interpreter(self.place.host_settings),
            port,
            str(self.root),
            self.work,
            rsync=all(host.rsync for host in reports),
            detached=detached,
            skews=tuple(host.skew for host in reports),
        )


def find_hosts(place: PlaceConfig, cwd: Path, say: Say, cancelled: Check) -> HostsTarget:
    """Query the hosts of a place, make their environment if that is configured, and compare them.

    Raises PlaceError, HostsError for hosts that do not answer or do not fit, and Cancelled.
    """
    name = place.name
    say(f"looking for the hosts of place {name}")  # queries gcloud
    transport = make_transport(place)
    targets = transport.hosts
    hosts = list_hosts([target.rpartition("@")[2] for target in targets])
    say(f"waiting for the hosts of place {name} to answer: {hosts}")
    report = check.ask(place, transport, cancelled=cancelled)
    if place.host_settings.environment == "make" and not report.silent and not cancelled():
        environment.make_environment(transport, report, say, cancelled)
        say(f"comparing the hosts of place {name}: {hosts}")
        report = check.ask(place, transport, cancelled=cancelled)
    if cancelled():
        raise Cancelled
    order = report.order()
    report = report.ordered()
    if problems := report.problems():
        raise HostsError(name, tuple(problems))
    say(f"the hosts of place {name} have answered: {hosts}")
    return HostsTarget(place, report, tuple(targets[i] for i in order), place.root(cwd), cwd)
