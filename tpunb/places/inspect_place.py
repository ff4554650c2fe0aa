"""`tpunb doctor --on PLACE`: checks a place's hosts, and whether they reach each other.

Runs only small programs on the hosts, which answer and end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpunb.places import check
from tpunb.places.check import HostsReport
from tpunb.places.config import find_hosts_place
from tpunb.places.errors import by_host
from tpunb.places.probe import PACKAGES
from tpunb.places.transport import Transport, ask_hosts, make_transport
from tpunb.runs.protocol import store_ports
from tpunb.runs.spec import count_cores

_VERSIONS = ("python", *PACKAGES)
PATIENCE = 15.0
"""Seconds for all hosts to reach each other."""


@dataclass(frozen=True)
class PlaceReport:
    """The report of `tpunb doctor --on` about a place."""

    hosts: HostsReport
    problems: list[tuple[str, str]]
    """Pairs of a host's name and a problem that prevents a run."""

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`."""
        place = self.hosts.place
        return {
            "place": place.name,
            "kind": place.kind,
            "hosts": [{"name": name, **asdict(host)} for name, host in self.hosts.answered],
            "problems": [{"host": host, "message": what} for host, what in self.problems],
        }

    def text(self) -> str:
        """Text for a terminal."""
        report, place, hosts = self.hosts, self.hosts.place, len(self.hosts.names)
        last = [f"problem: {line}" for line in by_host(self.problems)]
        if not last:
            cores = count_cores(hosts * report.local_cores, report.first.machine.device, hosts)
            last = [f"ready: %%tpu_train --on {place.name} runs on {cores}"]
        return "\n".join(
            [
                f"place {place.name} ({place.kind}, {place.file})",
                f"{hosts} hosts:",
                *_table(report),
                *last,
            ]
        )


def inspect_place(name: str, cwd: Path) -> PlaceReport:
    """Probe all hosts of a place, and let them connect to each other. Raises PlaceError."""
    place = find_hosts_place(name, cwd)
    transport = make_transport(place)
    report = check.ask(place, transport)
    found = report.problems()
    if len(report.answered) == len(report.names) > 1:
        found += _reach_problems(transport, report)
    return PlaceReport(report, found)


def _table(report: HostsReport) -> list[str]:
    """A line for each host that has answered, below their heads."""
    rows: list[tuple[str, ...]] = [("host", "address", "device", "worker", *_VERSIONS)]
    for name, host in report.answered:
        machine, versions = host.machine, host.versions
        device = f"{machine.chips} {machine.accelerator_type or 'TPU'}" * (machine.chips > 0)
        rows.append(
            (
                name,
                host.address,
                device or machine.device,
                str(machine.worker) if machine.workers > 1 else "-",
                *(versions[package] or "-" for package in _VERSIONS),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _reach_problems(transport: Transport, report: HostsReport) -> Iterator[tuple[str, str]]:
    """Let each host listen at its ports of a run, and connect to all others."""
    settings, hosts = report.place.host_settings, [host for _, host in report.answered]
    wanted = [set(check.run_ports(host.machine)) for host in hosts]
    wanted[0] |= set(store_ports(settings.port))
    pairs = list(zip(hosts, wanted, strict=True))
    asked = {
        "listening": {host.address: sorted(ports - {*host.taken}) for host, ports in pairs},
        "seconds": PATIENCE,
    }
    command = check.probe_command(settings)
    orders = {
        index: (command, json.dumps({**asked, "address": host.address}).encode())
        for index, host in enumerate(hosts)
    }
    names = {host.address: name for name, host in report.answered}
    for index, answer in ask_hosts(transport, orders).items():
        try:
            unreached = check.read_probe(answer)
        except ValueError as error:
            yield report.names[index], str(error)
            continue
        found: dict[str, list[str]] = {}
        for address, number in unreached:
            found.setdefault(names[address], []).append(str(number))
        for other, numbers in found.items():
            yield (
                report.names[index],
                f"it cannot reach {other} at port {', '.join(numbers)}: allow this traffic between "
                "the hosts (firewall rules, security groups)",
            )
