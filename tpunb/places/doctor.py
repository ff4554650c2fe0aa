"""`tpunb doctor --on PLACE`: checks a place's hosts, and whether they reach each other.

Runs only small programs on the hosts, which answer and end.
"""

from __future__ import annotations

import inspect
import json
import os
import select
import shlex
import time
from dataclasses import dataclass
from typing import Any

from tpunb.places import check, remote
from tpunb.places.check import HostsReport, interpreter
from tpunb.places.config import PlaceConfig
from tpunb.places.errors import by_host
from tpunb.places.transport import HostProcess, Transport, make_transport
from tpunb.runs.spec import count_cores
from tpunb.utils.files import LineBuffer
from tpunb.utils.text import size
from tpunb.utils.tools import PATIENCE

_HEADS = (
    *("host", "address", "device", "worker", "python", "tpunb", "torch", "torch_xla"),
    *("free", "clock"),
)


@dataclass(frozen=True)
class ReachReport:
    """The hosts' facts, and which hosts do not reach each other."""

    hosts: HostsReport
    unreached: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """A host, another host that it does not reach, and at which ports; () for any port."""

    def problems(self) -> list[tuple[str, str]]:
        """Pairs of a host's name and a problem that prevents a run."""
        found = self.hosts.problems()
        several = len(self.hosts.names) > 1 and not self.hosts.silent
        if several and self.hosts.rendezvous_port() is None:
            place = self.hosts.place
            found.append(
                (
                    self.hosts.names[0],
                    f"no port is free for the rendezvous, from {place.settings.port} on: name "
                    f"another `port` in [places.{place.name}]",
                )
            )
        for source, target, ports in self.unreached:
            where = f"port {', '.join(map(str, ports))}" if ports else "any port"
            found.append(
                (
                    source,
                    f"it cannot reach {target} at {where}: allow this traffic between the hosts "
                    "(firewall rules, security groups)",
                )
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """The output of `--json`."""
        problems = [{"host": host, "message": what} for host, what in self.problems()]
        return self.hosts.to_json() | {"problems": problems}

    def text(self) -> str:
        """Text for a terminal: a line for each host, then notes and problems."""
        place = self.hosts.place
        rows: list[tuple[str, ...]] = [_HEADS]
        for name, host in self.hosts.answered:
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
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [f"place {place.name} ({place.kind}, {place.file}): {len(self.hosts.names)} hosts"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        problems = self.problems()
        lines += [f"note: {line}" for line in by_host(self.hosts.notes())]
        lines += [f"problem: {line}" for line in by_host(problems)]
        if not problems:
            hosts = len(self.hosts.names)
            cores = count_cores(hosts * self.hosts.local_cores, self.hosts.device, hosts)
            lines.append(f"ready: %%tpu_train --on {place.name} runs on {cores}")
        return "\n".join(lines)


def inspect_hosts(place: PlaceConfig) -> ReachReport:
    """Probe all hosts of a place, and let them connect to each other. Raises PlaceError."""
    transport = make_transport(place)
    report = check.ask(place, transport)
    order = report.order()
    transport.reorder(order)
    report = report.ordered()
    if report.silent or len(report.names) == 1:
        return ReachReport(report)
    return ReachReport(report, tuple(_unreached(transport, report)))


def _unreached(transport: Transport, report: HostsReport) -> list[tuple[str, str, tuple[int, ...]]]:
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
            words = [inspect.getsource(remote), "reach", host.address, ports]
            command = f"exec {interpreter(report.place.host_settings)} -c {shlex.join(words)}"
            processes.append(HostProcess(transport.command(index, command)))
        readers = [_Lines(process) for process in processes]
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
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for index, answer in enumerate(answers):
        if answer is None:
            found.append((report.names[index], "another host", ()))
            continue
        ports_of: dict[str, list[int]] = {}
        for address, port in json.loads(answer):
            ports_of.setdefault(address, []).append(port)
        found += [(report.names[index], names[a], tuple(ports)) for a, ports in ports_of.items()]
    return found


class _Lines:
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
