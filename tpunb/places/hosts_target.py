"""`HostsTarget`: the hosts of a place that have answered and can take a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpunb.places import check, environment
from tpunb.places.check import HostsReport, interpreter
from tpunb.places.config import HostSettings, PlaceConfig
from tpunb.places.doctor import inspect_hosts
from tpunb.places.errors import HostsError, PlaceError, list_hosts
from tpunb.places.hosts import HostsPlace
from tpunb.places.place import Cancelled, Check, HostsRun, Say, place_of
from tpunb.places.target import Estimate, PlaceKind, PlaceTarget
from tpunb.places.transport import make_transport
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Device
from tpunb.utils.errors import TpunbError


@dataclass(frozen=True)
class HostsTarget(PlaceTarget):
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
    def hosts(self) -> tuple[str, ...]:
        return self.report.names

    @property
    def device(self) -> Device:
        return self.report.device

    @property
    def local_cores(self) -> int:
        return self.report.local_cores

    @property
    def facts(self) -> Mapping[str, Any]:
        host = self.report.answered[0][1].machine
        known = {"chips": host.chips, "accelerator_type": host.accelerator_type}
        return {**known, "memory": host.memory} if host.memory else known

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

    def resume(self, run: RunDir) -> str:
        place = place_of(run)
        shared = "" if place is None else place.checkpoints(run.id)
        on_hosts = place is not None and isinstance(place.settings, HostSettings)
        if not (shared or (on_hosts and len(self.hosts) == 1)):
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

    def notes(self, script: str) -> list[str]:
        return [
            *(f"{host}: {what}" for host, what in self.report.notes()),
            *super().notes(script),
        ]

    def without_checkpoints(self) -> list[str]:
        if len(self.hosts) == 1:
            return []
        return [
            "each host keeps its own checkpoints, and rank 0's are on "
            f"{self.hosts[0]} only: to resume, name a folder that all hosts share, or a URL, "
            f"as `checkpoints` of [places.{self.place.name}]"
        ]

    def placed(self, run_id: str, *, detached: bool) -> HostsRun:
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


KIND = PlaceKind(find_hosts, HostsRun, HostsPlace, inspect_hosts)
"""Functions of places with existing hosts."""
