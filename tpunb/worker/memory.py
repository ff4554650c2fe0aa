"""Evidence that the kernel has killed a process because memory ran out.

Standard library only: the guard uses it. What cannot be read says nothing: containers often
hide the kernel's log, and some hide their own cgroup.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


class Memory:
    """Compares what the system says now with how it was when this was made."""

    def __init__(self) -> None:
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._kills = _kills()
        self._machine = _machine_kills()

    def killed(self, pid: int) -> str:
        """How it is known that a process was killed for its memory; '' if nothing says so."""
        logged = _kernel_log(self._since)
        if pid in logged:
            return f"the kernel's log: {logged[pid]}"
        kills = _kills()
        if kills is not None and self._kills is not None and kills > self._kills:
            return f"a process was killed at this container's limit of {limit()} (cgroup)"
        if _machine_kills() - self._machine > len(logged):  # or the log says who they were
            return "the machine has killed a process for its memory since the run began"
        return ""


def _own(controller: str) -> Path:
    """The folder of this process's cgroup; that of its container where its own is hidden."""
    # A line is 'number:controllers:path'; version 2 has no controllers.
    root = _CGROUPS / controller
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            return own if own.is_dir() else root
    return root


def _read(*paths: Path) -> str:
    for path in paths:
        try:
            return path.read_text()
        except OSError:
            continue
    return ""


def _kills() -> int | None:
    """How many processes of this cgroup were killed so far."""
    text = _read(_own("") / "memory.events", _own("memory") / "memory.oom_control")
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


def _machine_kills() -> int:
    """How many processes of the machine were killed so far."""
    found = re.search(r"^oom_kill (\d+)$", _read(Path("/proc/vmstat")), re.MULTILINE)
    return int(found[1]) if found else 0


def total() -> int:
    """Bytes of memory that this container, or else this machine, has; 0 if unknown."""
    text = _read(_own("") / "memory.max", _own("memory") / "memory.limit_in_bytes").strip()
    bytes_ = int(text) if text.isdecimal() else 0
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    known = [count for count in (bytes_, int(found[1]) * 1024 if found else 0) if count]
    return min(known, default=0)


def limit() -> str:
    """The same in words: '13.6 GB'; '' if unknown."""
    return size(total()) if total() else ""


def size(count: int) -> str:
    """'512 MB', '13.6 GB'."""
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


def _kernel_log(since: float) -> dict[int, str]:
    """The kernel's line about each process that it has killed, if they may be read."""
    found: dict[int, str] = {}
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return found
    try:
        while True:
            try:
                # A read gives one record: 'level,number,microseconds,flags;text\n…'.
                head, _, text = os.read(log, 8192).decode("utf-8", "replace").partition(";")
            except BrokenPipeError:
                continue  # records were overwritten before they could be read
            except OSError:  # BlockingIOError: no more; EINVAL: a record that is too long
                return found
            killed = re.search(r"Killed process (\d+) ", text)
            if killed and float(head.split(",")[2]) / 1e6 >= since - 1:
                found[int(killed[1])] = text.partition("\n")[0].partition(", UID")[0]
    finally:
        os.close(log)
