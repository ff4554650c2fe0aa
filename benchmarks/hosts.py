"""Costs of a run on many hosts: start, heartbeats, lines, stop. Hosts are network namespaces.

Ranks have no torch, and the hosts share the processors of this machine. The time in which their
Pythons start is therefore reported separately from that of the hosts' communication.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from benchmarks.table import Samples, table
from tests.drivers.nodes import RunOnHosts, until
from tests.fakes import hosts
from tests.fakes.hosts import Pod

HOSTS, RANKS = 64, 4
TRAIN = """
import os, time
print("begun", time.time(), flush=True)
while not os.path.exists("talk"):
    time.sleep(0.1)
began = time.monotonic()
for number in range({lines} * {seconds}):
    while time.monotonic() - began < number / {lines}:
        time.sleep(0.05)
    print("line", number, "loss 0.123456, rate 0.001000", flush=True)
print("spoken", flush=True)
time.sleep(3600)
"""
LINES = 20
"""Lines a second of each rank."""
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(folder: Path, rounds: int, count: int, ranks: int, seconds: int) -> str:
    """Run `count` hosts with `ranks` each: `seconds` without output, then as long with lines."""
    if refused := hosts.why_refused():
        return f"hosts: {refused}"
    found: dict[str, Samples] = {}
    for number in range(rounds):
        for what, value in _once(folder / str(number), count, ranks, seconds).items():
            found.setdefault(what, Samples()).add([value])
    head = [f"{count} hosts × {ranks} ranks, {rounds} rounds", "measured"]
    return table([head, *([what, samples.text(2)] for what, samples in found.items())])


def _once(folder: Path, count: int, ranks: int, seconds: int) -> dict[str, float]:
    folder.mkdir()
    train = TRAIN.format(lines=LINES, seconds=seconds)
    with Pod(count, folder) as pod:
        run = RunOnHosts(pod, folder, train, ranks=ranks, hang_timeout=0.0)
        try:
            began = time.time()
            run.start_all(beat=2.0, lost_after=20.0, patience=600.0)
            until(lambda: _said(run, "begun") == run.spec.world_size, 900)
            first = [float(line.split()[-1]) for line in _lines(run, "begun")]
            here = _here(run, began)
            found = {
                "s until the last host is there (Python starts)": here - began,
                "s from then until the last rank's first line": max(first) - here,
                "s between the first rank's first line and the last's": max(first) - min(first),
            }
            found |= _quiet(run, seconds)
            found |= _talk(run, seconds)
            began = time.time()
            run.stop(count - 1)
            run.wait()
            found["s from a stop at the last host until all have ended"] = time.time() - began
        finally:
            run.close()
    return found


def _lines(run: RunOnHosts, word: str) -> list[str]:
    return [line for node in run.nodes.values() for line in node.log() if f" {word}" in line]


def _said(run: RunOnHosts, word: str) -> int:
    """The number of ranks that have printed this word."""
    return sum(node.files.get("run.log", b"").count(b" " + word.encode()) for node in
               run.nodes.values())  # fmt: skip


def _here(run: RunOnHosts, began: float) -> float:
    """When the last host reached host 0, as host 0 logged it."""
    log = (run.folders[0] / "supervisor.log").read_text()
    hours, minutes, rest = re.findall(r"^(\d+):(\d+):([\d.]+) host \d+: HostHere", log, re.M)[-1]
    day = time.mktime((*time.localtime(began)[:3], 0, 0, 0, 0, 0, -1))
    return day + int(hours) * 3600 + int(minutes) * 60 + float(rest)


def _supervisor(run: RunOnHosts, number: int) -> int:
    pid = run.nodes[number].process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _used(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _passed(run: RunOnHosts) -> int:
    """Bytes in and out of host 0."""
    text = Path(f"/proc/{run.hosts[0].pid}/net/dev").read_text()
    numbers = next(line for line in text.splitlines() if "eth0" in line).partition(":")[2].split()
    return int(numbers[0]) + int(numbers[8])


def _quiet(run: RunOnHosts, seconds: int) -> dict[str, float]:
    leader, member = _supervisor(run, 0), _supervisor(run, 1)
    before = _used(leader), _used(member), _passed(run)
    time.sleep(seconds)
    after = _used(leader), _used(member), _passed(run)
    return {
        "kB/s in and out of host 0, of heartbeats": (after[2] - before[2]) / seconds / 1000,
        "% of a core, host 0's supervisor": 100 * (after[0] - before[0]) / seconds,
        "% of a core, another one": 100 * (after[1] - before[1]) / seconds,
    }


def _talk(run: RunOnHosts, seconds: int) -> dict[str, float]:
    streamed = _streamed(run)
    began = time.monotonic()
    Path(run.spec.cwd, "talk").touch()
    until(lambda: _said(run, "spoken") == run.spec.world_size, 900)
    took = time.monotonic() - began
    wanted = LINES * seconds * run.spec.world_size
    return {
        f"lines that came, of {wanted:,}": float(_said(run, "line")),
        "lines/s": wanted / took,
        "kB/s of streams": (_streamed(run) - streamed) / took / 1000,
    }


def _streamed(run: RunOnHosts) -> int:
    return sum(node.bytes for node in run.nodes.values())
