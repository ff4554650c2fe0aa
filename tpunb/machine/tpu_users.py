"""Finds processes that use the TPU: they have its device files open, or hold its lock.

Opens no device file itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpunb.machine import tpu
from tpunb.runs.directory import RunDir
from tpunb.utils.owners import user_name
from tpunb.utils.text import excerpt

_PROC = Path("/proc")
LOCK = "tmp/libtpu_lockfile"
"""The file that libtpu locks while it uses the chips, and does not remove (libtpu 0.0.21)."""
_OF_A_RUN = re.compile(r"(.+)/attempts/\d+/[^/]+/[^/]+")
_KERNELS = ("ipykernel", "colab_kernel_launcher")

Kind = Literal["own_kernel", "kernel", "run", "process"]


@dataclass(frozen=True)
class TpuUser:
    pid: int
    kind: Kind
    user: str
    command: str
    """Its command line; empty if it cannot be read."""
    name: str = ""
    """The run's folder, or the kernel's notebook, if known."""
    living: bool = False
    """True for a rank of an active run: other runs wait for it."""

    def describe(self) -> str:
        """A noun phrase: 'process 12 of alice (python train.py)'."""
        who = f"process {self.pid} of {self.user}"
        if self.kind == "own_kernel":
            return f"this notebook's kernel (process {self.pid})"
        if self.kind == "kernel":
            return f"the kernel of {self.name or 'another notebook'} ({who})"
        if self.kind == "run":
            state = "which is active" if self.living else "which has ended"
            return f"a rank of run {Path(self.name).name}, {state} ({who})"
        return f"{who} ({excerpt(self.command, 80) or 'its command cannot be read'})"

    def fix(self) -> str:
        """How to end the process, or to wait for it."""
        kill = f"{'' if self._ours() else 'sudo '}kill {self.pid}"
        if self.kind == "own_kernel":
            return (
                "restart this kernel; its own device is then the CPU, unless "
                "`%tpu_setup --kernel tpu` requests the TPU"
            )
        if self.kind == "kernel":
            return f"shut down that kernel (in the list of running kernels), or `{kill}`"
        if self.kind == "run" and self.living:
            run = Path(self.name)
            place = shlex.quote(str(run.parent))
            return f"wait for it, or `tpunb stop {run.name} --runs {place}`"
        return f"`{kill}`"

    def _ours(self) -> bool:
        return os.geteuid() == 0 or self.user == user_name(os.geteuid())


def find_tpu_users(root: Path) -> list[TpuUser]:
    """Search all processes of the machine, if it has device files or the lock file of a TPU."""
    files = tpu.device_files(root)
    lock_file = root / LOCK
    if not files and not lock_file.exists():
        return []
    wanted = {os.path.realpath(path) for path in files}
    users: dict[int, TpuUser] = {}
    for pid in map(int, filter(str.isdecimal, os.listdir(_PROC))):
        try:
            held = list(_open_files(pid))
        except OSError:  # the process has just ended, or belongs to another user
            continue
        if wanted.intersection(held):
            users[pid] = _describe(pid, held)
    for pid in _lockers(lock_file) if lock_file.exists() else ():
        if pid not in users:
            users[pid] = _describe(pid, [])
    return list(users.values())


def _open_files(pid: int) -> Iterator[str]:
    folder = _PROC / str(pid) / "fd"
    for number in os.listdir(folder):
        try:
            yield os.readlink(folder / number)
        except FileNotFoundError:  # closed in the meantime
            continue


def _describe(pid: int, held: list[str]) -> TpuUser:
    command = _read(pid, "cmdline").replace("\0", " ").strip()
    user = "?"
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        user = user_name((_PROC / str(pid)).stat().st_uid)
    for path in held:
        match = _OF_A_RUN.fullmatch(path)
        if match is not None and (folder := RunDir(match.group(1))).spec.exists():
            return TpuUser(pid, "run", user, command, str(folder.path), folder.is_running())
    if pid == os.getpid():
        return TpuUser(pid, "own_kernel", user, command)
    if any(name in command for name in _KERNELS):
        return TpuUser(pid, "kernel", user, command, _notebook(pid))
    return TpuUser(pid, "process", user, command)


def _notebook(pid: int) -> str:
    """The notebook's name in the environment that Jupyter or VS Code gave the kernel; or ''."""
    for entry in _read(pid, "environ").split("\0"):
        name, _, value = entry.partition("=")
        if name in ("JPY_SESSION_NAME", "__vsc_ipynb_file__") and value:
            return Path(value).name
    return ""


def _lockers(path: Path) -> list[int]:
    """Processes of all users that have locked a file, from /proc/locks."""
    inode = str(path.stat().st_ino)
    pids = []
    with contextlib.suppress(OSError):  # some sandboxes have no /proc/locks
        for line in (_PROC / "locks").read_text(encoding="utf-8").splitlines():
            parts = line.split()
            if len(parts) >= 6 and parts[1] != "->" and parts[5].rpartition(":")[2] == inode:
                pids.append(int(parts[4]))
    return [pid for pid in pids if pid > 0]


def _read(pid: int, name: str) -> str:
    try:
        return (_PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, or belongs to another user
        return ""
