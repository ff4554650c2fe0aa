"""Collects the facts of a place's hosts, and checks them for problems and notes.

Used before each run, and by `tpunb doctor --on`.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpunb.machine.machine import Machine
from tpunb.places import probe
from tpunb.places.config import HostSettings, PlaceConfig
from tpunb.places.transport import Answer, Transport, ask_hosts
from tpunb.runs.spec import Device, Price
from tpunb.utils import records
from tpunb.utils.text import size
from tpunb.utils.version import installed_versions, package_digest

RANK_PORT = 8476
"""First port of torch_xla's ranks, which listen on one port each."""
MOST_SKEW = 5.0
"""Seconds by which a host's clock may differ before it is reported."""
LEAST_DISK = 1_000_000_000
"""Bytes that must be free in the folder of the runs."""
LIBTPU_PORT = 8471
"""Port of libtpu if one process drives all chips of a host (SPMD)."""
_TPU_PORTS = (LIBTPU_PORT, *range(RANK_PORT, RANK_PORT + 8))
_UNKNOWN = Machine("", "CPU", 0, "", 0, 0)
_RENDEZVOUS = 6
"""Number of ports that are tried for the rendezvous, starting with the place's."""


@dataclass(frozen=True)
class HostReport:
    """Facts of one host, as `probe` reports them."""

    host: str
    """Its own name."""
    address: str
    """The address at which it was reached; the other hosts use it as well."""
    python: str
    versions: Mapping[str, str]
    folder: str
    """Path of the folder of runs on the host."""
    free: int
    """Free bytes on that folder's disk."""
    taken: tuple[int, ...]
    """Ports that are in use."""
    rsync: str
    time: float
    """Seconds since the epoch, by its clock."""
    machine: Machine = _UNKNOWN
    """The machine as tpunb on the host detects it."""
    digest: str = ""
    """Digest of the host's tpunb's own files."""
    price: Price | None = None
    """Price of the slice, or of this machine if it is not part of a slice."""
    error: str = ""
    """Why these facts are missing: tpunb could not be imported."""
    chips_seen: bool = False
    """Whether it has device files of a TPU, which are visible without tpunb."""
    skew: float = 0.0
    """Seconds by which its clock is ahead of this machine's."""
    skew_error: float = 0.0
    """Uncertainty of `skew`: half the time that the answer took."""


@dataclass(frozen=True)
class HostsReport:
    """Facts of all hosts of a place, in the order of its transport."""

    place: PlaceConfig
    names: tuple[str, ...]
    """The hosts' names in `places.toml`."""
    hosts: tuple[HostReport | None, ...]
    """None for a host that has not answered."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why hosts have not answered, keyed by name."""

    def problems(self) -> list[tuple[str, str]]:
        """Pairs of a host's name and a problem that prevents a run."""
        return list(_problems(self))

    def notes(self) -> list[tuple[str, str]]:
        """Pairs of a host's name and a fact that is good to know."""
        return list(_notes(self))

    @property
    def answered(self) -> list[tuple[str, HostReport]]:
        """Names and facts of the hosts that have answered."""
        pairs = zip(self.names, self.hosts, strict=True)
        return [(name, host) for name, host in pairs if host is not None]

    def order(self) -> list[int]:
        """The hosts' indices in order of node rank: the TPU's worker number, if there is one."""
        workers = [None if host is None else host.machine.worker for host in self.hosts]
        if sorted(worker or 0 for worker in workers) == list(range(len(workers))):
            return sorted(range(len(workers)), key=lambda index: workers[index] or 0)
        return list(range(len(workers)))

    def ordered(self) -> HostsReport:
        """This report in order of node rank."""
        order = self.order()
        return replace(
            self,
            names=tuple(self.names[index] for index in order),
            hosts=tuple(self.hosts[index] for index in order),
        )

    @property
    def device(self) -> Device:
        return self.answered[0][1].machine.device

    @property
    def local_cores(self) -> int:
        """Ranks of each host without `--cores`."""
        return self.place.host_settings.cores or self.answered[0][1].machine.default_cores

    @property
    def price(self) -> Price | None:
        """Price of all hosts together; None if a host does not know its own."""
        prices = [host.price for _, host in self.answered]
        first = prices[0] if prices else None
        if first is None or any(host.machine.workers > 1 for _, host in self.answered):
            return first  # each host reports the price of the whole slice
        if any(price != first for price in prices):
            return None
        several = f"{len(prices)} × {first.what}" if len(prices) > 1 else first.what
        return replace(first, per_hour=first.per_hour * len(prices), what=several)

    def rendezvous_port(self) -> int | None:
        """A port that is free on host 0, like the port after it, which the ranks' store uses.

        None if none of the tried ports is.
        """
        taken = {*self.answered[0][1].taken, *_TPU_PORTS}
        tried = _tried_ports(self.place.host_settings)[:-1]
        return next((port for port in tried if not {port, port + 1} & taken), None)

    def wanted_ports(self) -> list[list[int]]:
        """Ports of each host that the other hosts must reach; 0: chosen by the system."""
        machines = [host.machine for _, host in self.answered]
        wanted = [
            [LIBTPU_PORT, *range(RANK_PORT, RANK_PORT + machine.chips)]
            if machine.device == "TPU"
            else [0]
            for machine in machines
        ]
        if (port := self.rendezvous_port()) is not None:
            wanted[0] = [port, port + 1, *wanted[0]]
        return wanted

    def to_json(self) -> dict[str, Any]:
        """The facts, for `tpunb doctor --on PLACE --json`."""
        hosts = [
            {
                "name": name,
                "reached": host is not None,
                **({} if host is None else _host_json(host)),
            }
            for name, host in zip(self.names, self.hosts, strict=True)
        ]
        advice = [{"host": host, "message": what} for host, what in self.notes()]
        return {"hosts": hosts, "advice": advice}


def _host_json(host: HostReport) -> dict[str, Any]:
    return {
        "host": host.host,
        "address": host.address,
        "python": host.python,
        "versions": dict(host.versions),
        "device": host.machine.device,
        "chips": host.machine.chips,
        "worker": host.machine.worker,
        "accelerator_type": host.machine.accelerator_type,
        "free": host.free,
        "skew": round(host.skew, 3),
    }


def ask(
    place: PlaceConfig, transport: Transport, *, cancelled: Callable[[], bool] = lambda: False
) -> HostsReport:
    """Probe all hosts at once. Hosts that do not answer are in `HostsReport.silent`."""
    settings = place.host_settings
    ports = [*_tried_ports(settings), *_TPU_PORTS]
    asked = json.dumps({"folder": settings.folder, "ports": ports}).encode()
    names = transport.hosts
    command = probe_command(settings)
    answers = ask_hosts(
        transport, dict.fromkeys(range(len(names)), (command, asked)), cancelled=cancelled
    )
    shown = tuple(name.rpartition("@")[2] for name in names)
    hosts: list[HostReport | None] = []
    silent = {}
    for index, name in enumerate(shown):
        host, problem = _read(answers[index])
        hosts.append(host)
        if host is None:
            silent[name] = problem
    return HostsReport(place, shown, tuple(hosts), silent)


def _tried_ports(settings: HostSettings) -> range:
    """Ports to try for the rendezvous, and one more for the ranks' store."""
    return range(settings.port, min(settings.port + _RENDEZVOUS + 1, 65536))


def probe_command(settings: HostSettings) -> str:
    """The command that runs `probe` on a host, with the interpreter of the ranks."""
    code = inspect.getsource(probe)
    return f"exec {interpreter(settings)} -c {shlex.quote(code)}"


def interpreter(settings: HostSettings) -> str:
    """The interpreter of the ranks, as a word of the host's shell."""
    if settings.environment == "make":
        made = f"{settings.folder.rstrip('/')}/env/bin/python"
        either = f"test -x {quote(made)} && echo {quote(made)} || echo {quote(settings.python)}"
        return f'"$({either})"'
    return quote(settings.python)


def quote(path: str) -> str:
    """A path as a word of the host's shell; `~/` stays the host's home folder."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:])}'
    return shlex.quote(path)


def _read(answer: Answer) -> tuple[HostReport | None, str]:
    """The facts in a host's answer; or None, and why there are none."""
    for line in answer.output.decode("utf-8", "replace").splitlines():
        if line.startswith(probe.MARK):
            try:
                host = records.build(HostReport, records.parse(line.removeprefix(probe.MARK)))
            except ValueError as error:
                return None, f"its answer cannot be read: {error}"
            middle = (answer.started + answer.ended) / 2
            half = (answer.ended - answer.started) / 2
            return replace(host, skew=host.time - middle, skew_error=half), ""
    return None, answer.problem or "its answer cannot be read"


def _public(version: str) -> str:
    """The version without its build, which may differ: '2.9.0' for '2.9.0+cpu'."""
    return version.partition("+")[0]


def _problems(report: HostsReport) -> Iterator[tuple[str, str]]:
    yield from report.silent.items()
    mine = installed_versions()
    for name, host in report.answered:
        yield from _package_problems(name, host, mine)
        if host.free < LEAST_DISK:
            yield (
                name,
                f"only {size(host.free)} is free in {host.folder}: remove old runs there, or "
                "name another `folder` in places.toml",
            )
    first: dict[str, str] = {}
    for name, host in report.answered:
        if (other := first.setdefault(host.address, name)) != name:
            yield name, f"it has the address of {other}, {host.address}: name each machine once"
    for package in ("torch", "torch_xla"):
        versions = [_public(host.versions.get(package, "")) for _, host in report.answered]
        yield from _different(
            report, [f"{package} {version or 'is missing'}" for version in versions], str
        )
    machines = [host.machine for _, host in report.answered]
    if any(host.error for _, host in report.answered):
        return  # reported above, or the environment has not been made yet
    kinds = [machine.device for machine in machines]
    yield from _different(report, kinds, lambda kind: f"it would run on {kind}")
    chips = [machine.chips for machine in machines]
    yield from _different(report, chips, lambda count: f"it has {count} chips")
    if len(set(kinds)) == 1 and kinds[0] == "TPU":
        yield from _slice_problems(report)


def _package_problems(
    name: str, host: HostReport, mine: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    fix = 'or set environment = "make" in places.toml'
    theirs = host.versions
    if theirs["python"].split(".")[:2] != mine["python"].split(".")[:2]:
        which = f"it has Python {theirs['python']}, and this kernel {mine['python']}"
        yield name, f"{which}: name the same version as `python` in places.toml, {fix}"
    if not theirs.get("tpunb"):
        yield name, f"tpunb is not installed for {host.python}: install {mine['tpunb']}, {fix}"
    elif theirs["tpunb"] != mine["tpunb"]:
        yield (
            name,
            f"it has tpunb {theirs['tpunb']}, and this kernel {mine['tpunb']}: install the same "
            f"version, {fix}",
        )
    elif host.error:
        yield name, f"tpunb cannot be imported on this host: {host.error}"
    elif host.digest != package_digest():
        yield (
            name,
            f"the files of its tpunb {theirs['tpunb']} differ from this kernel's: install the "
            f"same, {fix}",
        )
    for package in ("torch", "torch_xla"):
        # Without torch_xla here, runs use another backend.
        if not theirs.get(package) and (mine[package] or package == "torch"):
            yield name, f"{package} is not installed for {host.python}: install it, {fix}"


def _different(
    report: HostsReport, values: Sequence[Any], describe: Callable[[Any], str]
) -> Iterator[tuple[str, str]]:
    """Yield the hosts whose value differs from that of most hosts."""
    usual = Counter(values).most_common(1)[0][0] if values else None
    for (name, _), value in zip(report.answered, values, strict=True):
        if value != usual:
            yield name, f"{describe(value)}, unlike the other hosts ({describe(usual)})"


def _slice_problems(report: HostsReport) -> Iterator[tuple[str, str]]:
    """Check that each host of a slice takes part once: its chips start together or not at all."""
    for name, host in report.answered:
        machine = host.machine
        if machine.devices_per_chip > 1:
            yield (
                name,
                f"each chip of a {machine.accelerator_type} has several devices, which torch_xla "
                "drives from threads of one process; tpunb does not support this at a place",
            )
        if machine.workers != len(report.names):
            yield (
                name,
                (
                    f"it is one of the {machine.workers} hosts of a {machine.accelerator_type}, "
                    f"but the place names {len(report.names)}: name all hosts of the slice"
                ),
            )
    workers = Counter(host.machine.worker for _, host in report.answered)
    for name, host in report.answered:
        if workers[host.machine.worker] > 1:
            yield (
                name,
                f"it reports worker number {host.machine.worker}, like another host: name the "
                "hosts of one slice only",
            )
        if taken := [port for port in host.taken if port >= RANK_PORT]:
            yield (
                name,
                (
                    f"port {', '.join(map(str, taken))}, which torch_xla's ranks need, is in use: "
                    "another program uses this TPU. End it, or wait for it"
                ),
            )


def _notes(report: HostsReport) -> Iterator[tuple[str, str]]:
    mine = installed_versions()
    for name, host in report.answered:
        if abs(host.skew) > MOST_SKEW + host.skew_error:
            ahead = "ahead of" if host.skew > 0 else "behind"
            yield name, f"its clock is {abs(host.skew):.0f} s {ahead} this machine's"
        for package in ("torch", "torch_xla"):
            theirs, ours = _public(host.versions.get(package, "")), _public(mine[package])
            if theirs and ours and theirs != ours:
                yield name, f"it has {package} {theirs}, and this kernel {ours}"
