"""Collects the facts of a place's hosts, and checks them for problems.

Used before each run (`ask`) and by `tpunb doctor --on` (`inspect_place`). Runs only small programs
on the hosts, which answer and end.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpunb.machine.machine import Machine
from tpunb.places import probe
from tpunb.places.config import PlaceConfig, find_hosts_place
from tpunb.places.errors import by_host
from tpunb.places.transport import Answer, Transport, ask_hosts, make_transport
from tpunb.runs.protocol import store_ports
from tpunb.runs.spec import Price, count_cores
from tpunb.utils import records
from tpunb.utils.version import installed_versions, package_digest

RANK_PORT = 8476
"""First port of torch_xla's ranks, which listen on one port each."""
LIBTPU_PORT = 8471
"""Port of libtpu if one process drives all chips of a host (SPMD)."""
_TPU_PORTS = (LIBTPU_PORT, *range(RANK_PORT, RANK_PORT + 8))
_UNKNOWN = Machine("", "CPU", 0, "", 0, 0)


@dataclass(frozen=True)
class HostReport:
    """Facts of one host, as `probe` reports them."""

    address: str
    """The address at which it was reached; the other hosts use it as well."""
    python: str
    versions: Mapping[str, str]
    folder: str
    """Path of the folder of runs on the host."""
    taken: tuple[int, ...]
    """Ports that are in use."""
    machine: Machine = _UNKNOWN
    """The machine as tpunb on the host detects it."""
    digest: str = ""
    """Digest of the host's tpunb's own files."""
    price: Price | None = None
    """Price of the slice, or of this machine if it is not part of a slice."""
    error: str = ""
    """Why these facts are missing: tpunb could not be imported."""


@dataclass(frozen=True)
class HostsReport:
    """Facts of all hosts of a place, in order of node rank."""

    place: PlaceConfig
    targets: tuple[str, ...]
    """The transport's names of the hosts."""
    hosts: tuple[HostReport | str, ...]
    """Facts of each host, or why there are none."""

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names for people."""
        return tuple(target.rpartition("@")[2] for target in self.targets)

    @property
    def answered(self) -> list[tuple[str, HostReport]]:
        """Names and facts of the hosts that have answered."""
        pairs = zip(self.names, self.hosts, strict=True)
        return [(name, host) for name, host in pairs if not isinstance(host, str)]

    @property
    def first(self) -> HostReport:
        """The facts of the first host that has answered: host 0."""
        return self.answered[0][1]

    @property
    def local_cores(self) -> int:
        """Ranks of each host without `--cores`."""
        return self.place.host_settings.cores or self.first.machine.default_cores

    def problems(self) -> list[tuple[str, str]]:
        """Pairs of a host's name and a problem that prevents a run."""
        return list(_problems(self))

    def to_json(self) -> dict[str, Any]:
        """The output of `tpunb doctor --on PLACE --json`."""
        return {
            "place": self.place.name,
            "kind": self.place.kind,
            "hosts": [{"name": name, **asdict(host)} for name, host in self.answered],
            "problems": [{"host": host, "message": what} for host, what in self.problems()],
        }

    def __str__(self) -> str:
        """The output of `tpunb doctor --on PLACE`."""
        place, hosts = self.place, len(self.names)
        last = [f"problem: {line}" for line in by_host(self.problems())]
        if not last:
            cores = count_cores(hosts * self.local_cores, self.first.machine.device, hosts)
            last = [f"ready: %%tpu_train --on {place.name} runs on {cores}"]
        head = f"place {place.name} ({place.kind}, {place.file})"
        return "\n".join([head, f"{hosts} hosts:", *_table(self), *last])


def ask(
    place: PlaceConfig, transport: Transport, *, cancelled: Callable[[], bool] = lambda: False
) -> HostsReport:
    """Probe all hosts at once, and order them: by the TPU's worker numbers, if there are."""
    settings = place.host_settings
    ports = [*store_ports(settings.port), *_TPU_PORTS]
    asked = json.dumps({"folder": settings.folder, "ports": ports}).encode()
    command = f"exec {quote(settings.python)} -c {shlex.quote(inspect.getsource(probe))}"
    orders = dict.fromkeys(range(len(transport.hosts)), (command, asked))
    answers = ask_hosts(transport, orders, cancelled=cancelled)
    hosts = [_read(answer) for answer in answers.values()]
    workers = [-1 if isinstance(host, str) else host.machine.worker or 0 for host in hosts]
    order = list(range(len(hosts)))
    if sorted(workers) == order:
        order.sort(key=workers.__getitem__)
        transport.reorder(order)
    return HostsReport(place, transport.hosts, tuple(hosts[index] for index in order))


def inspect_place(name: str, cwd: Path) -> HostsReport:
    """Probe all hosts of a place. Raises PlaceError."""
    place = find_hosts_place(name, cwd)
    return ask(place, make_transport(place))


def quote(path: str) -> str:
    """A path as a word of the host's shell; `~/` stays the host's home folder."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:])}'
    return shlex.quote(path)


def _read(answer: Answer) -> HostReport | str:
    """The facts in what `probe` has printed on a host, or why there are none."""
    for line in answer.output.decode("utf-8", "replace").splitlines():
        if line.startswith(probe.MARK):
            try:
                return records.build(HostReport, records.parse(line.removeprefix(probe.MARK)))
            except ValueError as error:
                return str(error)
    return answer.problem or "it has not answered"


def _public(version: str) -> str:
    """The version without its build, which may differ: '2.9.0' for '2.9.0+cpu'."""
    return version.partition("+")[0]


def _problems(report: HostsReport) -> Iterator[tuple[str, str]]:
    for name, found in zip(report.names, report.hosts, strict=True):
        if isinstance(found, str):
            yield name, found
    mine, port = installed_versions(), report.place.host_settings.port
    for index, (name, host) in enumerate(report.answered):
        if not index and {*host.taken} >= {*store_ports(port)}:
            yield name, f"port {port} and the next ones are in use: name another `port`"
        for problem in _package_problems(host, mine):
            yield name, problem
    for package in probe.PACKAGES[1:]:
        versions = [_public(host.versions.get(package, "")) for _, host in report.answered]
        yield from _different(report, [f"{package} {each or 'is missing'}" for each in versions])
    if any(host.error for _, host in report.answered):
        return  # reported above
    machines = [host.machine for _, host in report.answered]
    kinds = [f"{each.chips} chips" if each.device == "TPU" else "no TPU" for each in machines]
    yield from _different(report, kinds)
    if all(each.device == "TPU" for each in machines):
        yield from _slice_problems(report)


def _package_problems(host: HostReport, mine: Mapping[str, str]) -> Iterator[str]:
    theirs = host.versions
    if theirs["python"].split(".")[:2] != mine["python"].split(".")[:2]:
        which = f"it has Python {theirs['python']}, and this kernel {mine['python']}"
        yield f"{which}: name an interpreter of this version as `python` in places.toml"
    if not theirs["tpunb"]:
        yield f"tpunb is not installed for {host.python}: install tpunb=={mine['tpunb']}"
    elif theirs["tpunb"] != mine["tpunb"]:
        which = f"it has tpunb {theirs['tpunb']}, and this kernel {mine['tpunb']}"
        yield f"{which}: install the same version"
    elif host.error:
        yield f"tpunb cannot be imported on this host: {host.error}"
    elif host.digest != package_digest():
        yield f"the files of its tpunb {theirs['tpunb']} differ from this kernel's: update them"
    for package in ("torch", "torch_xla"):
        # Without torch_xla here, runs use another backend.
        if not theirs[package] and (mine[package] or package == "torch"):
            yield f"{package} is not installed for {host.python}"


def _different(report: HostsReport, values: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the hosts whose value differs from that of most hosts."""
    usual = Counter(values).most_common(1)[0][0] if values else ""
    for (name, _), value in zip(report.answered, values, strict=True):
        if value != usual:
            yield name, f"it has {value}, unlike the other hosts ({usual})"


def _slice_problems(report: HostsReport) -> Iterator[tuple[str, str]]:
    """Check that each host of a slice takes part once: its chips start together or not at all."""
    numbers = [host.machine.worker or 0 for _, host in report.answered]
    for name, host in report.answered:
        machine = host.machine
        if machine.devices_per_chip > 1:
            yield (
                name,
                f"each chip of a {machine.accelerator_type} has several devices, which torch_xla "
                "drives from threads of one process; tpunb does not support this at a place",
            )
        if machine.workers != len(report.names) or numbers.count(machine.worker or 0) > 1:
            yield (
                name,
                f"it is worker {machine.worker} of the {machine.workers} hosts of a "
                f"{machine.accelerator_type}: the place must name each host of one slice once",
            )
        if taken := [port for port in host.taken if port >= RANK_PORT]:
            yield (
                name,
                f"port {', '.join(map(str, taken))}, which torch_xla's ranks need, is in use: "
                "another program uses this TPU. End it, or wait for it",
            )


def _table(report: HostsReport) -> list[str]:
    """A line for each host that has answered, below their heads."""
    versions = ("python", *probe.PACKAGES)
    rows: list[tuple[str, ...]] = [("host", "address", "device", "worker", *versions)]
    for name, host in report.answered:
        machine = host.machine
        device = f"{machine.chips} {machine.accelerator_type or 'TPU'}" * (machine.chips > 0)
        rows.append(
            (
                name,
                host.address,
                device or machine.device,
                str(machine.worker) if machine.workers > 1 else "-",
                *(host.versions[package] or "-" for package in versions),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
