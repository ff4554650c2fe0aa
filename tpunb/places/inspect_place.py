"""`tpunb doctor --on PLACE`: checks a place's hosts, and whether they reach each other.

Runs only small programs on the hosts, which answer and end.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpunb.places import check, remote
from tpunb.places.check import HostsReport, interpreter
from tpunb.places.config import PlaceConfig
from tpunb.places.errors import by_host
from tpunb.places.transport import HostProcess, Transport, make_transport, remote_command
from tpunb.runs.spec import count_cores
from tpunb.utils.files import LineBuffer
from tpunb.utils.text import size
from tpunb.utils.tools import PATIENCE

_HEADS = (
    *("host", "address", "device", "worker", "python", "tpunb", "torch", "torch_xla"),
    *("free", "clock"),
)


Unreached = tuple[str, str, tuple[int, ...]]
"""A host, another host that it does not reach, and at which ports; () for any port."""


@dataclass(frozen=True)
class PlaceReport:
    """The report of `tpunb doctor --on` about a place."""

    hosts: HostsReport
    found: tuple[tuple[str, str], ...]
    """Pairs of a host's name and a problem that prevents a run."""

    def problems(self) -> list[tuple[str, str]]:
        """Pairs of a host's name and a problem that prevents a run."""
        return list(self.found)

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`."""
        return {
            "place": self.hosts.place.name,
            "kind": self.hosts.place.kind,
            **self.hosts.to_json(),
            "problems": [{"host": host, "message": what} for host, what in self.found],
        }

    def text(self) -> str:
        """Text for a terminal."""
        report, place, hosts = self.hosts, self.hosts.place, len(self.hosts.names)
        last = [f"problem: {line}" for line in by_host(self.found)]
        if not last:
            cores = count_cores(hosts * report.local_cores, report.device, hosts)
            last = [f"ready: %%tpu_train --on {place.name} runs on {cores}"]
        return "\n".join(
            [
                f"place {place.name} ({place.kind}, {place.file})",
                f"{hosts} hosts:",
                *_table(report),
                *(f"note: {line}" for line in by_host(report.notes())),
                *last,
            ]
        )


def inspect_hosts(place: PlaceConfig) -> PlaceReport:
    """Probe all hosts of a place, and let them connect to each other. Raises PlaceError."""
    transport = make_transport(place)
    report = check.ask(place, transport)
    transport.reorder(report.order())
    report = report.ordered()
    alone = report.silent or len(report.names) == 1
    return make_report(report, [] if alone else _unreached(transport, report))


def make_report(report: HostsReport, unreached: Sequence[Unreached] = ()) -> PlaceReport:
    """The report about hosts, from their facts and which of them do not reach each other."""
    return PlaceReport(report, (*report.problems(), *_reach_problems(report, unreached)))


def _reach_problems(
    report: HostsReport, unreached: Sequence[Unreached]
) -> Iterator[tuple[str, str]]:
    place = report.place
    several = len(report.names) > 1 and not report.silent
    if several and report.rendezvous_port() is None:
        yield (
            report.names[0],
            f"no port is free for the rendezvous, from {place.host_settings.port} on: name another "
            f"`port` in [places.{place.name}]",
        )
    for source, target, ports in unreached:
        where = f"port {', '.join(map(str, ports))}" if ports else "any port"
        yield (
            source,
            f"it cannot reach {target} at {where}: allow this traffic between the hosts "
            "(firewall rules, security groups)",
        )


def _table(report: HostsReport) -> list[str]:
    """A line for each host that has answered, below their heads."""
    rows: list[tuple[str, ...]] = [_HEADS]
    for name, host in report.answered:
        machine, versions = host.machine, host.versions
        device = f"{machine.chips} {machine.accelerator_type or 'TPU'}" * (machine.chips > 0)
        rows.append(
            (
                name,
                host.address,
                device or machine.device,
                str(machine.worker) if machine.workers > 1 else "-",
                versions["python"],
                *(versions.get(package) or "-" for package in ("tpunb", "torch", "torch_xla")),
                size(host.free),
                f"{host.skew:+.1f} s" if abs(host.skew) > host.skew_error else "same",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _unreached(transport: Transport, report: HostsReport) -> list[Unreached]:
    """Let each host listen at its ports of a run, and connect to all others; return failures."""
    hosts = [host for _, host in report.answered]
    free = [
        [port for port in wanted if port not in host.taken]
        for wanted, host in zip(report.wanted_ports(), hosts, strict=True)
    ]
    processes = []
    try:
        for index, host in enumerate(hosts):
            ports = ",".join(map(str, free[index]))
            python = interpreter(report.place.host_settings)
            command = remote_command(python, "reach", host.address, ports)
            processes.append(HostProcess(transport.command(index, command)))
        readers = [_MarkedLines(process) for process in processes]
        deadline = time.monotonic() + PATIENCE
        said = [reader.next(remote.SAYS, deadline) for reader in readers]
        for index, process in enumerate(processes):
            others = [
                [host.address, json.loads(listening)]
                for other, (host, listening) in enumerate(zip(hosts, said, strict=True))
                if other != index and listening is not None
            ]
            process.send((json.dumps(others) + "\n").encode())
        answers = [reader.next(remote.SAYS, deadline) for reader in readers]
    finally:
        for process in processes:
            process.close()
    names = {host.address: name for name, host in report.answered}
    found: list[Unreached] = []
    for index, answer in enumerate(answers):
        if answer is None:
            found.append((report.names[index], "another host", ()))
            continue
        ports_of: dict[str, list[int]] = {}
        for address, port in json.loads(answer):
            ports_of.setdefault(address, []).append(port)
        found += [(report.names[index], names[a], tuple(ports)) for a, ports in ports_of.items()]
    return found


class _MarkedLines:
    """Reads marked lines from the output of a command on a host."""

    def __init__(self, process: HostProcess) -> None:
        self._process = process
        self._lines = LineBuffer()
        self._waiting: list[bytes] = []

    def next(self, mark: str, deadline: float) -> str | None:
        """The next line that begins with `mark`, without it; None if none comes in time."""
        fd = self._process.output.fileno()
        while True:
            while self._waiting:
                line = self._waiting.pop(0).decode("utf-8", "replace")
                if line.startswith(mark):
                    return line.removeprefix(mark)
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                return None
            self._waiting += self._lines.feed(data)
