"""The memory of this machine or container, and evidence of kills because it ran out.

Standard library only, because the supervisor uses it. Sources that cannot be read are ignored:
containers often hide the kernel's log, and some hide their own cgroup.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tpunb.utils.text import size

_CGROUPS = Path("/sys/fs/cgroup")


class OomDetector:
    """Compares the system's counts of out-of-memory kills with those at its creation."""

    def __init__(self) -> None:
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._kills = _kills()
        self._machine = _machine_kills()

    def evidence(self, pid: int) -> str:
        """Return evidence that a process was killed because memory ran out; '' if there is none."""
        logged = _kernel_log(self._since)
        if pid in logged:
            return f"the kernel's log: {logged[pid]}"
        kills = _kills()
        if kills is not None and self._kills is not None and kills > self._kills:
            limit = describe_memory_limit()
            return f"a process was killed at this container's limit of {limit} (cgroup)"
        if _machine_kills() - self._machine > len(logged):  # or the log says who they were
            return "the machine has killed a process for its memory since the run began"
        return ""


def _own(controller: str) -> Path:
    """Return the folder of this process's cgroup, or that of its container if its own is hidden."""
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
    """Return the number of processes of this cgroup killed so far; None if it is not known."""
    text = _read(_own("") / "memory.events", _own("memory") / "memory.oom_control")
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _machine_kills() -> int:
    """Return the number of processes of the machine killed so far."""
    match = re.search(r"^oom_kill (\d+)$", _read(Path("/proc/vmstat")), re.MULTILINE)
    return int(match[1]) if match else 0


def total_memory() -> int:
    """Return the memory in bytes of this container or machine; 0 if it is not known."""
    text = _read(_own("") / "memory.max", _own("memory") / "memory.limit_in_bytes").strip()
    bytes_ = int(text) if text.isdecimal() else 0
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(Path("/proc/meminfo")), re.MULTILINE)
    known = [count for count in (bytes_, int(match[1]) * 1024 if match else 0) if count]
    return min(known, default=0)


FIRST_TO_GO = "1000"
"""The score of a process that the system's out-of-memory killer selects before all others."""
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def oom_score() -> str:
    """Return this process's score for the out-of-memory killer; '' if it cannot be read."""
    return _read(_OOM_SCORE).strip()


def set_oom_score(score: str) -> None:
    """Set the score of this process and its future forks, if that is allowed."""
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(score)


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that this container can allocate without kills; None if not known.

    The kernel frees pages of files before it kills a process. Like Kubernetes, this counts only
    those that were not read lately (`inactive_file`) as free: freeing the others (`active_file`)
    slows down the processes that read them. `root`: for tests, the folder of a fake machine.
    """
    text = _read(root / "proc/meminfo")
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    free = [int(match[1]) * 1024] if match else []
    group = _own("") if root == Path("/") else root / _CGROUPS.relative_to("/")
    limit = _read(group / "memory.max").strip()
    used = _read(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cache = re.search(r"^inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        free.append(max(0, int(limit) - int(used) + (int(cache[1]) if cache else 0)))
    return min(free, default=None)


def added_memory(base: int, forks: Sequence[int]) -> int:
    """Return the bytes that `forks` of the process `base` use in addition to it, all given by pid.

    Pages that several of them share count once (smaps_rollup). 0 if they cannot be read.
    """
    texts = [_read(Path(f"/proc/{pid}/smaps_rollup")) for pid in (base, *forks)]
    # Each shared page belongs to every process in equal parts, so the sum counts it once.
    return max(sum(_rollup(text, "Pss_Anon") for text in texts) - _rollup(texts[0], "Anonymous"), 0)


def _rollup(text: str, name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def describe_memory_limit() -> str:
    """Return `total_memory` as text: '14 GB'; '' if it is not known."""
    return size(total_memory()) if total_memory() else ""


def _kernel_log(since: float) -> dict[int, str]:
    """Return the kernel's log line about each process that it killed, if the log can be read."""
    lines: dict[int, str] = {}
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return lines
    try:
        while True:
            try:
                # A read gives one record: 'level,number,microseconds,flags;text\n…'.
                head, _, text = os.read(log, 8192).decode("utf-8", "replace").partition(";")
            except BrokenPipeError:
                continue  # records were overwritten before they could be read
            except OSError:  # BlockingIOError: no more; EINVAL: a record that is too long
                return lines
            killed = re.search(r"Killed process (\d+) ", text)
            if killed and float(head.split(",")[2]) / 1e6 >= since - 1:
                lines[int(killed[1])] = text.partition("\n")[0].partition(", UID")[0]
    finally:
        os.close(log)
