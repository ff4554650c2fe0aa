"""Runs commands on the hosts of a place with ssh or gcloud: one process for each host.

The user's own ssh configuration, agent, jump hosts and known hosts are used. Added are: no question
for a password, a keep-alive and a connect time-out. Standard input reaches the command on the host,
also through gcloud (SDK 528: `tpu-vm ssh` and `compute ssh` leave it to the ssh that they start).
"""

from __future__ import annotations

import inspect
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, Any

from tpunb.places import remote
from tpunb.places.config import GcloudSettings, PlaceConfig, SshSettings
from tpunb.places.errors import PlaceError
from tpunb.utils import tools
from tpunb.utils.tools import PATIENCE, StoppedError, ToolError, ToolProblem

_OPTIONS = ("BatchMode=yes", "ServerAliveInterval=5", "ConnectTimeout=30")
"""Options of ssh. Three unanswered messages (ServerAliveCountMax, 3 by default) end a
connection: a host that vanishes is noticed within 20 s."""
_TAIL = 4000
"""Bytes kept from the end of a command's stderr."""


class Transport(ABC):
    """How commands reach the hosts of a place."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)
        """Names of the hosts, for people, in order of node rank."""

    @abstractmethod
    def command(self, host: int, remote: str) -> list[str]:
        """The local command that runs `remote` in a shell on a host."""

    def reorder(self, order: Sequence[int]) -> None:
        """Give the hosts new node ranks: `order` lists their present ones."""
        self.hosts = tuple(self.hosts[index] for index in order)


class SshTransport(Transport):
    """Hosts that are reached by plain ssh."""

    _SSH = ("ssh", "-T", *(f"-o{option}" for option in _OPTIONS))

    def command(self, host: int, remote: str) -> list[str]:
        return [*self._SSH, "--", self.hosts[host], remote]


@dataclass(frozen=True)
class _TpuNode:
    """What `gcloud … tpu-vm describe` prints, as far as it is needed."""

    state: str = "unknown"
    networkEndpoints: tuple[Any, ...] = ()  # noqa: N815 (as gcloud prints it)


@dataclass(frozen=True)
class _Instance:
    """A VM in the output of `gcloud … list-instances`."""

    instance: str
    """Its URL."""
    instanceStatus: str = "unknown"  # noqa: N815 (as gcloud prints it)


class GcloudTransport(Transport):
    """The hosts of a TPU VM, in order of their worker numbers, or of a managed instance group."""

    def __init__(self, settings: GcloudSettings, *, group: bool) -> None:
        """Ask gcloud for the hosts. Raises PlaceError if they are not ready."""
        self._settings = settings
        project = [f"--project={settings.project}"] if settings.project else []
        self._where = [f"--zone={settings.zone}", *project]
        self._words: dict[str, list[str]]
        """The words of gcloud that log in to a host, by its name."""
        name, vms = settings.name, ("compute", "tpus", "tpu-vm")
        if group:
            told = self._ask(
                tuple[_Instance, ...],
                *("compute", "instance-groups", "managed", "list-instances", name),
            )
            names = sorted(each.instance.rpartition("/")[2] for each in told)
            self._words = {each: ["compute", "ssh", each] for each in names}
            states = {each.instanceStatus for each in told}
        else:
            node = self._ask(_TpuNode, *vms, "describe", name)
            self._words = {
                f"{name}-w{worker}": [*vms, "ssh", name, f"--worker={worker}"]
                for worker in range(len(node.networkEndpoints))
            }
            states = {node.state}
        if not self._words or states - {"READY", "RUNNING"}:
            raise PlaceError(
                f"{name} is not ready: {len(self._words)} hosts, state "
                f"{', '.join(sorted(states)) or 'unknown'}"
            )
        super().__init__(list(self._words))

    def _ask(self, kind: Any, *words: str) -> Any:
        """Return gcloud's answer as a value of a type. Raises PlaceError."""
        command = ["gcloud", *words, *self._where, "--format=json"]
        try:
            return tools.read_json(kind, tools.call(command), shlex.join(command))
        except ToolError as error:
            raise PlaceError(str(error)) from None

    def command(self, host: int, remote: str) -> list[str]:
        settings = self._settings
        return [
            "gcloud", *self._words[self.hosts[host]], *self._where, "--quiet",
            *(["--internal-ip"] if settings.internal_ip else []),
            *(["--tunnel-through-iap"] if settings.tunnel else []),
            *(f"--ssh-flag=-o{option}" for option in _OPTIONS),
            f"--command={remote}",
        ]  # fmt: skip


def make_transport(place: PlaceConfig) -> Transport:
    """The transport to the hosts of a place. Raises PlaceError if the hosts are not ready."""
    if isinstance(place.settings, GcloudSettings):
        return GcloudTransport(place.settings, group=place.kind == "gcloud-mig")
    return SshTransport(place.settings_as(SshSettings).hosts)


@dataclass(frozen=True)
class Answer:
    """Output of a command on a host."""

    host: str
    output: bytes
    errors: str
    problem: str
    """Why the command has failed; '' if it has not."""


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
    Raises PlaceError if a command cannot be executed at all.
    """
    over = threading.Event()

    def run(host: int) -> Answer:
        words, data = remote[host]
        command = transport.command(host, words)
        output, errors, problem = b"", "", ""
        try:
            ended = tools.run(
                command,
                shown=command[0],
                given=data,
                timeout=timeout,
                cancelled=lambda: over.is_set() or cancelled(),
                into=into.get(host),
            )
            output = ended.output
            errors = tools.plain(ended.errors[-_TAIL:].decode("utf-8", "replace")).strip()
            if ended.returncode:
                # gcloud adds a line of its own after that of its ssh.
                last = "; ".join(errors.splitlines()[-2:])
                problem = last or tools.describe_exit(ended.returncode)
        except ToolError as error:
            if error.problem in (ToolProblem.MISSING, ToolProblem.NOT_STARTED):
                raise PlaceError(str(error)) from None
            problem = str(error)
        except StoppedError as error:
            problem = str(error)
        return Answer(transport.hosts[host], output, errors, problem)

    with futures.ThreadPoolExecutor(len(remote) or 1) as pool:
        try:
            return dict(zip(remote, pool.map(run, remote), strict=True))
        finally:
            over.set()


def remote_command(python: str, *words: str) -> str:
    """A command of `remote` for a host's shell; `python`: the interpreter, as a word of it."""
    return f"{python} -c {shlex.join([inspect.getsource(remote), *words])}"
