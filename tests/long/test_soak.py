"""Many runs in one process: nothing stays in it, in its supervisor, or in temporary files."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel, kernel, until
from tests.support import Driver, fork_server
from tpunb.utils import processes

RUNS = 60
EARLY = 20
"""The run after which everything has been imported and every cache is filled."""
LARGER = 12_000_000
"""Bytes by which a process's memory may differ: what the allocator happens to keep. 80 runs
that each leave 200 KB behind are beyond it."""


@dataclass
class TpuUsers:
    """What a process has at a moment."""

    memory: int
    files: list[str]
    """Their names, without numbers."""
    threads: int
    zombies: int


def holding(pid: int) -> TpuUsers:
    """What it always has: a file that is open for a moment is none of it."""
    looks = []
    for _ in range(5):
        looks.append(_holding(pid))
        time.sleep(0.1)
    return min(looks, key=lambda look: (len(look.files), look.threads, look.zombies))


def _holding(pid: int) -> TpuUsers:
    proc = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    children = [processes._stat(int(n)) for n in os.listdir("/proc") if n.isdigit()]
    return TpuUsers(
        memory=int(status["VmRSS"].split()[0]) * 1024,
        files=sorted(re.sub(r"\d+", "", _target(fd)) for fd in (proc / "fd").iterdir()),
        threads=int(status["Threads"]),
        zombies=sum(s is not None and s.ppid == pid and s.state == "Z" for s in children),
    )


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except FileNotFoundError:  # the listing's own
        return "the listing's"


def no_more(early: TpuUsers, late: TpuUsers, whose: str) -> None:
    assert late.memory - early.memory < LARGER, f"{whose}: {early} has become {late}"
    # What early had for a moment, as a socket of a client that has just left, is no matter.
    more = Counter(late.files) - Counter(early.files)
    assert not more, f"{whose}: {more}"
    assert late.threads <= early.threads, f"{whose}: {early}, {late}"
    assert late.zombies <= early.zombies, f"{whose}: {early}, {late}"


TRAIN = """
import os, subprocess, sys, tpunb
rank = int(os.environ["RANK"])
tpunb.log(step=1, value=rank)
print("line", rank)
tpunb.save({"rank": rank}, 1)
if number % 5 == 1 and rank == 1:
    raise ValueError("odd")
if number % 5 == 2:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
if number % 5 == 3 and rank == 1:
    os.kill(os.getpid(), 9)
x = list(range(1000))
"""
STATES = {0: "succeeded", 1: "failed", 2: "succeeded", 3: "failed", 4: "succeeded"}


@pytest.fixture
def own_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that nobody else writes to."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.usefixtures("starts_processes")
def test_soak_many_runs_of_one_launcher_leak_nothing(tmp_path: Path, own_temporary: Path) -> None:
    gc.collect()  # what tests before this one have left would be closed some time later
    driver = Driver(tmp_path / "runs")
    driver.warm()
    supervisor = driver.supervisor_pid

    def everyone() -> dict[str, TpuUsers]:
        server = fork_server(supervisor)  # after each run another one, a fork of the one before
        assert server is not None
        pids = (os.getpid(), supervisor, server.pid)
        return dict(zip(("kernel", "supervisor", "fork server"), map(holding, pids), strict=True))

    early: dict[str, TpuUsers] = {}
    files: list[str] = []
    for number in range(1, RUNS + 1):
        seen = driver.run([f"number = {number}"], TRAIN, returns=("x",))
        assert seen.result.state == STATES[number % 5], seen.result.explain()
        del seen
        if number == EARLY:
            early = everyone()
            files = sorted(os.listdir(own_temporary))
    assert driver.supervisor_pid == supervisor
    for name, late in everyone().items():
        no_more(early[name], late, name)
    assert early["supervisor"].zombies == early["fork server"].zombies == 0
    assert sorted(os.listdir(own_temporary)) == files
    driver.launcher.close()
    until(lambda: not os.listdir(own_temporary), "nothing is left in temporary files")


@pytest.mark.usefixtures("starts_processes")
def test_soak_many_runs_of_one_kernel_leak_nothing(tmp_path: Path, own_temporary: Path) -> None:
    """With all that a train cell does in a kernel: capture, conversion, display, returns."""
    with kernel(tmp_path) as nb:
        nb.run("%load_ext tpunb\n%tpu_setup --cores 2", "load").good()
        early = late = (holding(os.getpid()), 0)
        for number in range(1, 21):
            source = f"%%tpu_train --returns x\nx = list(range({number}))\nprint('run', {number})"
            nb.run(source, "train").good()
            if number in (5, 20):
                late = (_kernel(nb), len(os.listdir(own_temporary)))
                early = late if number == 5 else early
        no_more(early[0], late[0], "the kernel")
        until(lambda: len(os.listdir(own_temporary)) <= early[1], "no run has left a file")
    until(lambda: not os.listdir(own_temporary), "nothing is left in temporary files")


def _kernel(nb: Kernel) -> TpuUsers:
    nb.run("import gc; gc.collect()", "collect").good()
    pid = nb.value("__import__('os').getpid()")
    assert isinstance(pid, int)
    return holding(pid)
