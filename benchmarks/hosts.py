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
            run.start()
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
            run.stop()
            run.wait(900)
            found["s from a stop until all have ended"] = time.time() - began
        finally:
            run.close()
    return found


def _lines(run: RunOnHosts, word: str) -> list[str]:
    return [line for line in run.log() if f" {word}" in line]


def _said(run: RunOnHosts, word: str) -> int:
    """The number of times that ranks have printed this word."""
    return run.dir.log.read_bytes().count(b" " + word.encode()) if run.dir.log.exists() else 0


def _here(run: RunOnHosts, began: float) -> float:
    """When the last host was there and its fork server ready, as the run's supervisor logged it."""
    log = run.text("supervisor.log")
    found = re.findall(r"^(\d+):(\d+):([\d.]+) h\d+: (?:NodeHere|Ready)", log, re.MULTILINE)
    day = time.mktime((*time.localtime(began)[:3], 0, 0, 0, 0, 0, -1))
    return max(day + int(h) * 3600 + int(m) * 60 + float(s) for h, m, s in found)


def _used(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _quiet(run: RunOnHosts, seconds: int) -> dict[str, float]:
    pids = run.supervisor.pid, run.supervisor_of(1)
    before = [_used(pid) for pid in pids]
    time.sleep(seconds)
    own, node = (100 * (_used(p) - b) / seconds for p, b in zip(pids, before, strict=True))
    return {"% of a core, the run's supervisor": own, "% of a core, a host's": node}


def _talk(run: RunOnHosts, seconds: int) -> dict[str, float]:
    used = _used(run.supervisor.pid)
    began = time.monotonic()
    Path(run.spec.cwd, "talk").touch()
    until(lambda: _said(run, "spoken") == run.spec.world_size, 900)
    took = time.monotonic() - began
    wanted = LINES * seconds * run.spec.world_size
    return {
        f"lines that came, of {wanted:,}": float(_said(run, "line")),
        "lines/s": wanted / took,
        "% of a core, the run's supervisor, meanwhile": (
            100 * (_used(run.supervisor.pid) - used) / took
        ),
    }
