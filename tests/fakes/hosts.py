"""Hosts that are network namespaces of this machine, on one bridge: `with Pod(3) as pod`.

Each has an address of its own (10.77.0.2 …), a name that the others know, a host name, a file
/etc/hosts and a home. Processes see each other's by pid, and share all other files. Needs root, or
a user who may make namespaces, and `ip` of iproute2: `why_refused` says what is missing.

    pod      a process that holds the bridge's namespaces
      └─ host 0 …   a process for each that holds its own: network, mounts, host name
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PREFIX = "10.77.0."
_HOLD = "echo held; exec sleep infinity"


@functools.cache
def why_refused() -> str:
    """Why there can be no such hosts here; '' if there can."""
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"hosts are network namespaces, which need `{tool}`"
    try:
        with Pod(1) as pod:
            return "" if pod[0].run(["true"]).returncode == 0 else "namespaces cannot be entered"
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are refused here: {error}"


class Host:
    """One host of a pod."""

    def __init__(self, pod: Pod, number: int, name: str, folder: Path | None) -> None:
        self.pod = pod
        self.number = number
        self.name = name
        self.address = f"{PREFIX}{number + 2}"
        self.home = None if folder is None else folder / name
        self._holder = pod._hold(["--net", "--mount", "--uts"])
        self.pid = self._holder.pid
        self._link = f"h{number}"
        pod._ip(["link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns",
                 str(self.pid)])  # fmt: skip
        pod._ip(["link", "set", self._link, "master", "br0", "up"])
        for words in (
            ["link", "set", "lo", "up"],
            ["addr", "add", f"{self.address}/16", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
        ):
            self._do(["ip", *words])
        self._do(["hostname", name])
        if self.home is not None:
            self.home.mkdir(parents=True, exist_ok=True)

    def enter(self) -> list[str]:
        """The command that runs what follows on this host."""
        return [*self.pod._enter(self.pid), "--uts"]

    def popen(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; `options` are those of subprocess.Popen."""
        return subprocess.Popen([*self.enter(), *command], env=self.environment(env), **options)

    def run(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and wait for it."""
        made = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run([*self.enter(), *command], env=self.environment(env), **made)

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's, with the host's own home, and `env`."""
        own = {} if self.home is None else {"HOME": str(self.home)}
        return {**os.environ, **own, **(env or {})}

    def _do(self, command: Sequence[str]) -> None:
        self.run(command, check=True)

    def processes(self) -> list[int]:
        """The pids of all processes on this host, but for the one that holds it."""
        own = os.readlink(f"/proc/{self.pid}/ns/net")
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != self.pid:
                with contextlib.suppress(OSError):
                    if os.readlink(f"{entry.path}/ns/net") == own and not _is_zombie(entry.path):
                        found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """End every process on it at once, as a machine that is switched off does."""
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def know(self, names: Mapping[str, str]) -> None:
        """Have exactly these names in /etc/hosts: addresses by name."""
        lines = "".join(f"{address} {name}\n" for name, address in names.items())
        script = 'd=$(mktemp -d) && mount -t tmpfs none "$d" && printf "$0" >"$d/hosts" && '
        self._do(["sh", "-c", script + 'mount --bind "$d/hosts" /etc/hosts', lines])

    def small_disk(self, folder: Path, size: str) -> None:
        """Give a folder a disk of its own on this host, of so many bytes ('1m')."""
        self._do(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)])

    def path(self, path: Path | str) -> Path:
        """A path of this host as this process sees it (disks of its own included)."""
        return Path(f"/proc/{self.pid}/root{path}")

    def close(self) -> None:
        self.kill()
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdout, self._holder.stderr):
            assert stream is not None
            stream.close()


class Pod:
    """Several hosts: `pod[0]`, … Their names are h0, h1, … and all of them know these."""

    def __init__(
        self, hosts: int, folder: Path | None = None, names: Sequence[str] | None = None
    ) -> None:
        """`folder`: where the hosts' homes are."""
        self._names = names or [f"h{number}" for number in range(hosts)]
        self._folder = folder
        self._own_user = os.geteuid() != 0
        self._stack = contextlib.ExitStack()
        self.hosts: list[Host] = []

    def __enter__(self) -> Pod:
        with self._stack:
            user = ["--user", "--map-root-user"] if self._own_user else []
            self._holder = self._start([*user, "--net", "--mount"], [])
            self._stack.callback(self._end)
            self._ip(["link", "add", "br0", "type", "bridge"])
            self._ip(["link", "set", "br0", "up"])
            self._ip(["link", "set", "lo", "up"])
            for number, name in enumerate(self._names):
                host = Host(self, number, name, self._folder)
                self.hosts.append(host)
                self._stack.callback(host.close)
            known = {"localhost": "127.0.0.1", **{h.name: h.address for h in self.hosts}}
            for host in self.hosts:
                host.know(known)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def _start(self, namespaces: list[str], inside: list[str]) -> subprocess.Popen[bytes]:
        """A process that holds namespaces, once it does. OSError if they are refused."""
        made = subprocess.Popen(
            [*inside, "unshare", *namespaces, "sh", "-c", _HOLD],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert made.stdout is not None
        assert made.stderr is not None
        if made.stdout.readline() != b"held\n":
            made.kill()
            _, said = made.communicate()
            raise OSError(said.decode(errors="replace").strip() or "unshare has failed")
        return made

    def _hold(self, namespaces: list[str]) -> subprocess.Popen[bytes]:
        return self._start(namespaces, self._enter(self._holder.pid))

    def _enter(self, pid: int) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._own_user else []
        return ["nsenter", "--target", str(pid), *user, "--net", "--mount"]

    def _ip(self, words: list[str]) -> None:
        subprocess.run(
            [*self._enter(self._holder.pid), "ip", *words], check=True, capture_output=True
        )

    def _end(self) -> None:
        self._holder.kill()
        self._holder.wait()
        streams: list[IO[bytes] | None] = [self._holder.stdout, self._holder.stderr]
        for stream in streams:
            assert stream is not None
            stream.close()


def _is_zombie(folder: str) -> bool:
    return Path(folder, "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
