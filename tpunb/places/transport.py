"""Runs commands on the hosts of a place with ssh or gcloud: one process for each host.

The user's own ssh configuration, agent, jump hosts and known hosts are used. Added are: no question
for a password, and a keep-alive and a connect time-out unless they are configured. Standard input
reaches the command on the host, also through gcloud (SDK 528: `tpu-vm ssh` and `compute ssh` leave
it to the ssh that they start).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any, Protocol

from tpunb.places.config import (
    GcloudMigSettings,
    GcloudTpuSettings,
    PlaceConfig,
    SshSettings,
)
from tpunb.places.errors import PlaceError, as_place_error
from tpunb.utils import tools
from tpunb.utils.tools import PATIENCE, ToolError, ToolProblem

_DEFAULTS = {
    "serveraliveinterval": ("0", "ServerAliveInterval=5"),
    "connecttimeout": ("none", "ConnectTimeout=15"),
}
"""Values that `ssh -G` prints for options that are not configured, and the options then added.
Three unanswered messages (ServerAliveCountMax, 3 by default) end a connection."""
_FLAGS = ("-o", "BatchMode=yes")
_TAIL = 4000
"""Bytes kept from the end of a command's stderr."""
MOST = tools.MOST
"""The most bytes that a host may answer."""


class Transport(Protocol):
    """How commands reach the hosts of a place."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, for people, in order of node rank."""

    def command(self, host: int, remote: str) -> list[str]:
        """The local command that runs `remote` in a shell on a host."""

    def shell(self, host: int) -> tuple[list[str], str] | None:
        """The remote shell for rsync and the host's name; None if rsync cannot be used."""

    def reorder(self, order: Sequence[int]) -> None:
        """Give the hosts new node ranks: `order` lists their present ones."""


class SshTransport:
    """Hosts that are reached by plain ssh."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = list(hosts)
        self._options: dict[str, list[str]] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    def reorder(self, order: Sequence[int]) -> None:
        self._hosts = [self._hosts[index] for index in order]

    def _ssh(self, host: str) -> list[str]:
        if host not in self._options:
            self._options[host] = missing_options(host)
        return ["ssh", "-T", *_FLAGS, *self._options[host]]

    def command(self, host: int, remote: str) -> list[str]:
        name = self._hosts[host]
        return [*self._ssh(name), "--", name, remote]

    def shell(self, host: int) -> tuple[list[str], str] | None:
        name = self._hosts[host]
        return self._ssh(name), name


def missing_options(host: str) -> list[str]:
    """Options of ssh that the user's configuration does not set for this host.

    Raises PlaceError if ssh cannot be called.
    """
    try:
        printed = tools.call(["ssh", "-G", "--", host]).output
    except ToolError as error:
        if error.problem is not ToolProblem.FAILED:
            raise PlaceError(str(error)) from None
        printed = ""  # ssh itself will report what is wrong with the configuration
    configured = dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)
    return [
        word
        for name, (unset, option) in _DEFAULTS.items()
        if configured.get(name, unset) == unset
        for word in ("-o", option)
    ]


@dataclass(frozen=True)
class _Endpoint:
    ipAddress: str  # noqa: N815 (as gcloud prints it, like the names below)


@dataclass(frozen=True)
class _TpuNode:
    """What `gcloud … tpu-vm describe` prints, as far as it is needed."""

    state: str | None = None
    networkEndpoints: tuple[_Endpoint, ...] | None = None  # noqa: N815


@dataclass(frozen=True)
class _Instance:
    """A VM in the output of `gcloud … list-instances`."""

    instanceStatus: str | None = None  # noqa: N815
    name: str | None = None
    instance: str | None = None

    @property
    def known_as(self) -> str:
        return self.name or (self.instance or "").rpartition("/")[2]


class GcloudTpuTransport:
    """The hosts of one TPU VM: their node rank is their worker number."""

    def __init__(self, settings: GcloudTpuSettings) -> None:
        self._settings = settings
        node = _ask_gcloud(
            _TpuNode, "compute", "tpus", "tpu-vm", "describe", settings.name, *_where(settings)
        )
        endpoints = node.networkEndpoints or ()
        if node.state != "READY" or not endpoints:
            state = node.state or "no state"
            raise PlaceError(
                f"TPU VM {settings.name} is not ready (state: {state}): "
                "check it with "
                f"`gcloud compute tpus tpu-vm list {shlex.join(_where(settings))}`"
            )
        self.addresses = tuple(endpoint.ipAddress for endpoint in endpoints)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{self._settings.name}-w{number}" for number in range(len(self.addresses)))

    def command(self, host: int, remote: str) -> list[str]:
        return [
            "gcloud", "compute", "tpus", "tpu-vm", "ssh", self._settings.name,
            *_where(self._settings), f"--worker={host}", *_flags(self._settings),
            f"--command={remote}",
        ]  # fmt: skip

    def shell(self, host: int) -> tuple[list[str], str] | None:
        return None

    def reorder(self, order: Sequence[int]) -> None:
        """Do nothing: worker i is always host i."""


class GcloudMigTransport:
    """The VMs of a managed instance group."""

    def __init__(self, settings: GcloudMigSettings) -> None:
        self._settings = settings
        listed = _ask_gcloud(
            tuple[_Instance, ...],
            *("compute", "instance-groups", "managed", "list-instances", settings.name),
            *_where(settings),
        )
        self._names = sorted(each.known_as for each in listed)
        waiting = [each for each in listed if each.instanceStatus != "RUNNING"]
        if waiting or not all(self._names) or not listed:
            what = (
                f"{len(waiting)} of {len(listed)} VMs are not running" if listed else "it has no VM"
            )
            raise PlaceError(f"instance group {settings.name} is not ready: {what}")

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._names)

    def command(self, host: int, remote: str) -> list[str]:
        return [
            "gcloud", "compute", "ssh", self._names[host], *_where(self._settings),
            *_flags(self._settings),
            *(["--tunnel-through-iap"] if self._settings.tunnel else []),
            f"--command={remote}",
        ]  # fmt: skip

    def shell(self, host: int) -> tuple[list[str], str] | None:
        return None

    def reorder(self, order: Sequence[int]) -> None:
        self._names = [self._names[index] for index in order]


def _where(settings: GcloudTpuSettings) -> list[str]:
    project = [f"--project={settings.project}"] if settings.project else []
    return [f"--zone={settings.zone}", *project]


def _flags(settings: GcloudTpuSettings) -> list[str]:
    """Options of gcloud against questions, and to notice dead connections."""
    ssh = ["-oBatchMode=yes", *(f"-o{option}" for _, option in _DEFAULTS.values())]
    internal = ["--internal-ip"] if settings.internal_ip else []
    return ["--quiet", *internal, *(f"--ssh-flag={flag}" for flag in ssh)]


def _ask_gcloud(kind: Any, *words: str) -> Any:
    """Return gcloud's answer as a value of a type. Raises PlaceError."""
    command = ["gcloud", *words, "--format=json"]
    with as_place_error():
        return tools.read_json(kind, tools.call(command).output, shlex.join(command))


def make_transport(place: PlaceConfig) -> Transport:
    """The transport to the hosts of a place. Raises PlaceError if the hosts are not ready."""
    match place.settings:
        case GcloudMigSettings() as settings:
            return GcloudMigTransport(settings)
        case GcloudTpuSettings() as settings:
            return GcloudTpuTransport(settings)
    return SshTransport(place.settings_as(SshSettings).hosts)


class HostProcess:
    """A command on a host: the local process with its streams."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start the command. Raises PlaceError if the tool cannot be called."""
        self.tool = command[0]
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        try:
            self._process = tools.start(command, stderr=self._stderr)
        except ToolError as error:
            self._stderr.close()
            raise PlaceError(str(error)) from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self.input = self._process.stdin
        self.output = self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        """Write to the command's standard input, unless the command has ended."""
        with contextlib.suppress(OSError, ValueError):
            self.input.write(data)
            self.input.flush()

    def close_input(self) -> None:
        """Close the command's standard input: to a supervisor, the end of its lifeline."""
        with contextlib.suppress(OSError):
            self.input.close()

    @property
    def returncode(self) -> int | None:
        """The command's exit code, 255 if ssh failed; None while it is running."""
        return self._process.poll()

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds for the end; return the exit code, or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def errors(self) -> str:
        """The end of the command's stderr."""
        if self._stderr.closed:
            return ""
        self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - _TAIL))
        return tools.plain(self._stderr.read().decode("utf-8", "replace")).strip()

    def too_much(self) -> bool:
        """True if the command has written more to its stderr than is ever kept."""
        return not self._stderr.closed and os.fstat(self._stderr.fileno()).st_size > MOST

    def kill(self) -> None:
        """Kill the local process."""
        with contextlib.suppress(ProcessLookupError):
            # gcloud starts an ssh of its own.
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the local process, and with it the connection."""
        self.kill()
        self._process.wait()
        # Only now: a thread may be waiting to write to it, and closing would wait for the thread.
        self.close_input()
        self.output.close()
        self._stderr.close()


@dataclass(frozen=True)
class Answer:
    """Output and exit code of a command on a host."""

    host: str
    returncode: int | None
    """None if the command was cut off, after the time-out or because it was cancelled."""
    output: bytes
    errors: str
    started: float
    """Seconds since the epoch, by this machine's clock."""
    ended: float
    endless: bool = False
    """It was cut off because of its output."""

    def problem(self) -> str:
        """Why the command has failed; '' if it has not."""
        if self.endless:
            start = tools.quote(self.output[:400].decode("utf-8", "replace"), 100)
            return f"it has printed more than {MOST / 1e6:g} MB, which begin with {start}"
        if self.returncode is None:
            return f"no answer in {self.ended - self.started:.0f} s"
        if self.returncode:
            # gcloud adds a line of its own after that of its ssh.
            return "; ".join(self.errors.splitlines()[-2:]) or f"exit code {self.returncode}"
        return ""


def ask_hosts(
    transport: Transport,
    remote: Mapping[int, tuple[str, bytes]],
    *,
    timeout: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
    into: Mapping[int, IO[bytes]] = MappingProxyType({}),
) -> dict[int, Answer]:
    """Run a command on several hosts at once, and wait for all of them.

    `remote`: the command and its standard input, keyed by host. Commands that have not ended after
    `timeout` seconds, or when `cancelled` returns True, are cut off. `into`: files for the output,
    keyed by host, if it is too long for `Answer.output`.
    """
    commands = {
        host: (transport.command(host, command), data) for host, (command, data) in remote.items()
    }
    return run_commands(transport.hosts, commands, timeout=timeout, cancelled=cancelled, into=into)


def run_commands(
    names: Sequence[str],
    commands: Mapping[int, tuple[Sequence[str], bytes]],
    *,
    timeout: float,
    cancelled: Callable[[], bool],
    into: Mapping[int, IO[bytes]] = MappingProxyType({}),
) -> dict[int, Answer]:
    """Run local commands, one for each of several hosts; otherwise like `ask_hosts`."""
    processes: dict[int, HostProcess] = {}
    inputs = {host: memoryview(data) for host, (_, data) in commands.items()}
    outputs = {host: bytearray() for host in commands}
    ended: dict[int, float] = {}
    endless: set[int] = set()
    started = time.time()

    def running() -> bool:  # a command may close its output before it ends
        return any(p.returncode is None for host, p in processes.items() if host not in endless)

    with selectors.DefaultSelector() as selector:
        try:
            for host, (command, _) in commands.items():
                processes[host] = process = HostProcess(command)
                os.set_blocking(process.input.fileno(), False)
                selector.register(process.output, selectors.EVENT_READ, host)
                selector.register(process.input, selectors.EVENT_WRITE, host)
            deadline = time.monotonic() + timeout
            while (
                (selector.get_map() or running())
                and time.monotonic() < deadline
                and not cancelled()
            ):
                for host, process in processes.items():
                    if host not in endless and (len(outputs[host]) > MOST or process.too_much()):
                        endless.add(host)
                        for file in (process.output, process.input):
                            if not file.closed and file in selector.get_map():
                                selector.unregister(file)
                        process.kill()
                for key, _ in selector.select(0.1 if selector.get_map() else 0.01):
                    host = key.data
                    process = processes[host]
                    if host in endless:
                        continue
                    if key.fileobj is process.output:
                        data = os.read(key.fd, 1 << 16)
                        if host in into:
                            into[host].write(data)
                        else:
                            outputs[host] += data
                        if not data:
                            ended[host] = time.time()
                            selector.unregister(process.output)
                        continue
                    try:
                        inputs[host] = inputs[host][os.write(key.fd, inputs[host][: 1 << 16]) :]
                    except BlockingIOError:
                        continue
                    except BrokenPipeError:
                        inputs[host] = memoryview(b"")
                    if not inputs[host]:
                        selector.unregister(process.input)
                        process.close_input()
            codes = {
                host: processes[host].returncode if host in ended else None for host in commands
            }
            return {
                host: Answer(
                    names[host],
                    codes[host],
                    bytes(outputs[host]),
                    process.errors(),
                    started,
                    time.time() if codes[host] is None else ended[host],
                    host in endless,
                )
                for host, process in processes.items()
            }
        finally:
            for process in processes.values():
                process.close()


def find_rsync() -> str | None:
    """The path of rsync on this machine; None if it is not installed."""
    return shutil.which("rsync")
