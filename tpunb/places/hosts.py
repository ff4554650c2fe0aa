"""Runs on hosts that are reached by ssh or gcloud: `tpunb node` on each host (`runs.stream`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import secrets
import shlex
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from tpunb.places import archive, remote, transfer
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.place import Cancelled, Check, ConnectionLost, HostLine, HostsRun, Place, Say
from tpunb.places.transport import (
    HostProcess,
    Transport,
    ask_hosts,
    make_transport,
    remote_command,
)
from tpunb.runs import folder_stream, stream
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Stop
from tpunb.runs.stream import Alive, End, Line, Start
from tpunb.utils import files
from tpunb.utils.tools import PATIENCE

ALIVE, GONE = 5.0, 30.0
"""Seconds between two heartbeats to each host, and seconds without a heartbeat after which the host
considers this process gone: a connection that is cut does not close at its other end."""
POLL_INTERVAL = 0.05
"""Seconds that `follow` waits for a line before it yields None."""
LONGEST = 2 * folder_stream.MOST
"""Longest line of a host in bytes: more than a line with a whole file in base64."""
WAITING = 256
"""Lines that may wait to be written. Hosts that send faster are made to wait."""
AGAIN = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before each attempt to reconnect to a host of a detached run."""


class _Connection:
    """A connection to a host. A thread writes to it, so that a slow host delays no other."""

    def __init__(self, command: Sequence[str], first: bytes) -> None:
        self.process = HostProcess(command)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.send(first)
        threading.Thread(target=self._write, daemon=True).start()

    def send(self, data: bytes) -> None:
        self._outgoing.put(data)

    def close_input(self) -> None:
        """Close the host's input after all waiting data: to a supervisor, its lifeline's end."""
        self._outgoing.put(None)

    def _write(self) -> None:
        while (data := self._outgoing.get()) is not None:
            self.process.send(data)
        self.process.close_input()

    def close(self) -> None:
        self.process.close()
        self.close_input()


class HostsPlace(Place):
    """A run on hosts: a connection to each host, with one thread to read and one to write."""

    def __init__(self, run: RunDir, placed: HostsRun, transport: Transport | None = None) -> None:
        super().__init__(run, placed)
        if transport is None:
            transport = make_transport(placed.place)
            names = transport.hosts
            if sorted(names) != sorted(placed.hosts):
                raise PlaceError(
                    f"run {run.id} was started on {', '.join(placed.hosts)}, but place "
                    f"{placed.place.name} now has other hosts: {', '.join(names)}"
                )
            transport.reorder([names.index(host) for host in placed.hosts])
        self._transport = transport
        self._connections: dict[int, _Connection] = {}
        self._said: queue.Queue[HostLine] = queue.Queue(WAITING)
        self._letting_go = False
        self._alive = time.monotonic()
        """Time of the latest heartbeat."""
        self._stops: list[Stop] = []
        """All stop requests so far: hosts that are reached again may have missed them."""

    # Starting

    def start(self, variables: Mapping[str, str], say: Say, cancelled: Check) -> None:
        settings = self.placed.place.host_settings
        if settings.files:
            transfer.send_files(self._transport, self.placed, say, cancelled)
        if cancelled():
            raise Cancelled
        payload = archive.pack(archive.run_files(self.run, stream.SENT))
        digest = hashlib.sha256(payload).hexdigest()
        key = secrets.token_hex(32)
        for host in range(len(self.placed.hosts)):
            command = self._node(host, len(payload), digest)
            first = payload + stream.encode(Start(key, dict(variables), GONE))
            self._connect(host, command, first)

    def _node(self, host: int, size: int, digest: str) -> str:
        """The command that unpacks the run folder on a host and becomes its supervisor."""
        placed = self.placed
        node = [
            "node", "--run", placed.folders[host], "--node-rank", str(host),
            "--address", placed.addresses[host],
            "--leader", placed.addresses[0], "--port", str(placed.port),
            *(["--detach"] if placed.detached else []),
        ]  # fmt: skip
        unpack = remote_command(
            placed.python, "unpack", placed.folders[host], str(size), digest, *node
        )
        return f"exec {unpack}"

    def _connect(self, host: int, command: str, first: bytes) -> None:
        connection = _Connection(self._transport.command(host, command), first)
        self._connections[host] = connection
        words = (host, connection.process, self._said)
        threading.Thread(target=self._read, args=words, daemon=True).start()

    def _read(self, host: int, process: HostProcess, into: queue.Queue[HostLine]) -> None:
        """Pass on the lines of a host, in a thread of its own, until its connection ends."""
        lines = stream.StreamReader(LONGEST)
        ended = False
        while not ended:
            try:
                data = os.read(process.output.fileno(), 1 << 18)
            except (OSError, ValueError):  # closed by this process
                break
            if not data:
                break
            for said in lines.feed(data):
                if isinstance(said, str):
                    continue  # output of a login shell
                ended = ended or isinstance(said, End)
                into.put(HostLine(host, said))
        if not ended:
            code = process.wait(PATIENCE)
            told = process.errors().splitlines()
            reason = told[-1] if told else f"{process.tool} has ended without a message"
            into.put(HostLine(host, ConnectionLost(f"{reason} (exit code {code})")))

    # Following

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[HostLine | None]:
        if not self._connections:
            for host in range(len(self.placed.hosts)):
                self._follow_again(host, since[host])
        waiting: dict[int, float] = {}
        tries = dict.fromkeys(range(len(self.placed.hosts)), 0)
        left = set(tries)
        while left:
            self._send_heartbeat()
            for host, due in list(waiting.items()):
                if time.monotonic() >= due:
                    del waiting[host]
                    self._follow_again(host, since[host])
            try:
                said = self._said.get(timeout=POLL_INTERVAL)
            except queue.Empty:
                yield None
                continue
            host = said.host
            if isinstance(said.line, ConnectionLost):
                self._close(host)
                if self.placed.detached and not self._letting_go and tries[host] < len(AGAIN):
                    waiting[host] = time.monotonic() + AGAIN[tries[host]]
                    tries[host] += 1
                    continue
                left.discard(host)
            elif isinstance(said.line, End):
                left.discard(host)
            else:
                tries[host] = 0
            yield said

    def _follow_again(self, host: int, since: Mapping[str, int]) -> None:
        """Follow a run that is running or has ended, from the offsets `since` on."""
        folder = self.placed.folders[host]
        words = ["-m", "tpunb", "node", "--run", folder, "--follow"]
        command = f"cd / && exec {self.placed.python} {shlex.join(words)}"
        first = (json.dumps(dict(since)) + "\n").encode()
        self._connect(host, command, first + b"".join(map(stream.encode, self._stops)))

    def stop(self, request: Stop) -> None:
        self._stops.append(request)
        self._send_all(request)

    def _send_all(self, line: Line) -> None:
        for connection in self._connections.values():
            connection.send(stream.encode(line))

    def _send_heartbeat(self) -> None:
        """Tell the hosts that they are followed, if it is time."""
        if time.monotonic() - self._alive >= ALIVE and not self._letting_go:
            self._alive = time.monotonic()
            self._send_all(Alive())

    def _close(self, host: int) -> None:
        connection = self._connections.pop(host, None)
        if connection is not None:
            connection.close()

    def release_lifelines(self) -> None:
        """Close every lifeline, but keep the connections open for the remaining lines."""
        self._letting_go = True
        for connection in self._connections.values():
            connection.close_input()

    def close(self) -> None:
        self._letting_go = True
        for host in list(self._connections):
            self._close(host)

    # Files

    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        """Raises HostsError if a host does not answer."""
        commands = {
            host: (remote_command(self.placed.python, "pack", folder, *patterns), b"")
            for host, folder in enumerate(self.placed.folders)
            if hosts is None or host in hosts
        }
        fetched = []
        spec = self.run.read_spec()
        with contextlib.ExitStack() as stack:
            # Checkpoints may be larger than this machine's memory.
            archives = {
                host: stack.enter_context(tempfile.TemporaryFile(dir=into)) for host in commands
            }
            answers = ask_hosts(self._transport, commands, timeout=24 * 3600.0, into=archives)
            if problems := [(a.host, a.problem) for a in answers.values() if a.problem]:
                raise HostsError(self.placed.place.name, tuple(problems), "nothing was fetched")
            for host, packed in archives.items():
                try:
                    fetched += extract(packed, into, host, spec.ranks_on(host))
                except (ValueError, tarfile.TarError) as error:
                    problem = (answers[host].host, f"its archive cannot be read: {error}")
                    raise HostsError(
                        self.placed.place.name, (problem,), "not all files were fetched"
                    ) from None
        return fetched


def extract(packed: IO[bytes], into: Path, host: int, ranks: range) -> list[Path]:
    """Extract files of a host's run folder into the local one. Raises ValueError and TarError."""
    packed.seek(0)
    start = packed.read(1 << 20).find(remote.ARCHIVE)
    if start < 0:
        raise ValueError("it has no start")
    packed.seek(start + len(remote.ARCHIVE))
    fetched = []
    with tarfile.open(fileobj=packed, mode="r|") as members:
        for member in members:
            place = stream.fetched_path(_inside(member.name), host, ranks)
            if not member.isfile() or place is None:
                continue
            path = into / place
            path.parent.mkdir(parents=True, exist_ok=True)
            source = members.extractfile(member)
            assert source is not None
            with open(files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                shutil.copyfileobj(source, file)
            fetched.append(path)
    return fetched


def _inside(name: str) -> str:
    """Return a path of an archive. Raises ValueError if it leads out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name} is not in the run folder")
    return name
