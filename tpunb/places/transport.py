"""Runs commands on the hosts of a place with ssh or gcloud: one process for each host.

The user's own ssh configuration, agent, jump hosts and known hosts are used. Added are: no question
for a password, and a keep-alive and a connect time-out unless they are configured. Standard input
reaches the command on the host, also through gcloud (SDK 528: `tpu-vm ssh` and `compute ssh` leave
it to the ssh that they start).
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any

from tpunb.places import remote
from tpunb.places.config import (
    GcloudMigSettings,
    GcloudTpuSettings,
    PlaceConfig,
    SshSettings,
)
from tpunb.places.errors import PlaceError, as_place_error
from tpunb.utils import tools
from tpunb.utils.tools import PATIENCE, StoppedError, ToolError, ToolProblem

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


class Transport(ABC):
    """How commands reach the hosts of a place."""

    @property
    @abstractmethod
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts, for people, in order of node rank."""

    @abstractmethod
    def command(self, host: int, remote: str) -> list[str]:
        """The local command that runs `remote` in a shell on a host."""

    def shell(self, host: int) -> tuple[list[str], str] | None:
        """The remote shell for rsync and the host's name; None if rsync cannot be used."""
        return None

    def reorder(self, order: Sequence[int]) -> None:  # noqa: B027 (most have a fixed order)
        """Give the hosts new node ranks: `order` lists their present ones."""


class SshTransport(Transport):
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


class GcloudTpuTransport(Transport):
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


class GcloudMigTransport(Transport):
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

    def close(self) -> None:
        """Kill the local process, and with it the connection."""
        with contextlib.suppress(ProcessLookupError):  # gcloud starts an ssh of its own
            os.killpg(self._process.pid, signal.SIGKILL)
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
    """None if the command was cut off: after the time-out, because it was cancelled, or because of
    its output."""
    output: bytes
    errors: str
    started: float
    """Seconds since the epoch, by this machine's clock."""
    ended: float
    problem: str
    """Why the command has failed; '' if it has not."""


def ask_hosts(
    transport: Transport, remote: Mapping[int, tuple[str, bytes]], **limits: Any
) -> dict[int, Answer]:
    """Run a command on several hosts at once, and wait for all of them.

    `remote`: the command and its standard input, keyed by host; `limits`: see `run_commands`.
    """
    commands = {
        host: (transport.command(host, command), data) for host, (command, data) in remote.items()
    }
    return run_commands(transport.hosts, commands, **limits)


def run_commands(
    names: Sequence[str],
    commands: Mapping[int, tuple[Sequence[str], bytes]],
    *,
    timeout: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
    into: Mapping[int, IO[bytes]] = MappingProxyType({}),
) -> dict[int, Answer]:
    """Run local commands, one for each of several hosts, and wait for all of them.

    Commands that have not ended after `timeout` seconds, or when `cancelled` returns True, are cut
    off. `into`: files for the output, keyed by host, if it is too long for `Answer.output`.
    """
    over = threading.Event()

    def run(host: int) -> Answer:
        command, data = commands[host]
        started = time.time()
        code, output, errors, problem = None, b"", "", ""
        try:
            ended = tools.run(
                command,
                given=data,
                timeout=timeout,
                most=MOST,
                cancelled=over.is_set,
                into=into.get(host),
            )
            code, output = ended.returncode, ended.output
            errors = tools.plain(ended.errors[-_TAIL:].decode("utf-8", "replace")).strip()
            if code:
                # gcloud adds a line of its own after that of its ssh.
                problem = "; ".join(errors.splitlines()[-2:]) or f"exit code {code}"
        except ToolError as error:
            if error.problem in (ToolProblem.MISSING, ToolProblem.NOT_STARTED):
                raise PlaceError(str(error)) from None
            problem = f"no answer in {time.time() - started:.0f} s"
            if error.problem is ToolProblem.TOO_LONG:
                start = tools.quote(error.said, 100)
                problem = f"it has printed more than {MOST / 1e6:g} MB, which begin with {start}"
        except StoppedError:
            problem = f"no answer in {time.time() - started:.0f} s"
        return Answer(names[host], code, output, errors, started, time.time(), problem)

    with futures.ThreadPoolExecutor(len(commands) or 1) as pool:
        try:
            asked = {host: pool.submit(run, host) for host in commands}
            while futures.wait(asked.values(), 0.1).not_done:
                if cancelled():
                    over.set()
        finally:
            over.set()
    return {host: answer.result() for host, answer in asked.items()}


def remote_command(python: str, *words: str) -> str:
    """A command of `remote` for a host's shell; `python`: the interpreter, as a word of it."""
    return f"{python} -c {shlex.join([inspect.getsource(remote), *words])}"


def receiver(python: str, folder: str, data: bytes) -> str:
    """The command that extracts an archive from its standard input into a folder of a host."""
    digest = hashlib.sha256(data).hexdigest()
    return remote_command(python, "receive", folder, str(len(data)), digest)
