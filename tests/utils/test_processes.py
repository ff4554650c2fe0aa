from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import until
from tpunb.utils import processes


def python(code: str) -> subprocess.Popen[str]:
    """Start a process and wait until it has reported that it is ready."""
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import signal, time\n{code}\nprint('ready', flush=True)\n"
            "while True:\n    time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.fixture
def child(starts_processes: None) -> Iterator[subprocess.Popen[str]]:
    made = python("")
    yield made
    made.kill()
    made.wait()
    assert made.stdout is not None
    made.stdout.close()


@pytest.mark.usefixtures("starts_processes")
def test_title_of_a_process_and_of_its_forks() -> None:
    code = "import os\nfrom tpunb.utils.processes import set_title\nset_title('fork server')\n"
    child = python(f"{code}if os.fork(): os.wait()\nset_title('rank 1', 'wine' * 99)")
    [fork] = processes.descendants(child.pid)
    found = []
    for pid in (child.pid, fork.pid):
        command = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
        found += [command, Path(f"/proc/{pid}/comm").read_text().strip()]
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()
    assert found[:2] == [[sys.executable, "tpunb: fork server"], "tpunb: fork ser"]
    [program, title], name = found[2:]
    assert (program, name) == (sys.executable, "tpunb: rank 1")
    assert title.startswith("tpunb: rank 1 of winewine")  # as much as there is room for


def test_zombie(child: subprocess.Popen[str]) -> None:
    assert not processes.is_zombie(child.pid)
    child.kill()
    until(lambda: processes.is_zombie(child.pid), "it is a zombie")
    child.wait()
    assert not processes.is_zombie(child.pid)


def test_a_process_is_told_from_a_later_one_with_its_pid(child: subprocess.Popen[str]) -> None:
    found = processes.find_process(child.pid)
    assert found is not None
    assert processes.is_alive(found)
    assert not processes.is_alive(processes.Process(found.pid, found.started - 1))
    assert not processes.send_signal(
        processes.Process(found.pid, found.started - 1), signal.SIGKILL
    )
    child.kill()
    until(lambda: not processes.is_alive(found), "it has ended")  # a zombie does not count
    assert processes.find_process(child.pid) is None
    assert not processes.send_signal(found, signal.SIGTERM)


@pytest.mark.usefixtures("starts_processes")
def test_adopted_children_that_have_ended_are_let_go() -> None:
    code = """
import os, subprocess, sys, time
from tpunb.utils import processes
processes.adopt_orphans()
own = subprocess.Popen(["true"])
subprocess.run(["bash", "-c", "sleep 0.1 & echo"], stdout=subprocess.DEVNULL)
def zombies():
    return sum(") Z " in open(f"/proc/{n}/stat").read() for n in children())
def children():
    return open(f"/proc/self/task/{os.getpid()}/children").read().split()
while zombies() < 2:
    time.sleep(0.01)
processes.reap_adopted([processes.Process(own.pid, 0)])
print(children() == [str(own.pid)], own.wait())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def test_descendants_parents_first(child: subprocess.Popen[str]) -> None:
    deep = subprocess.Popen(["bash", "-c", "sleep 600 & wait"], start_new_session=True)
    until(lambda: processes.descendants(deep.pid), "it has a child")
    found = [process.pid for process in processes.descendants(os.getpid())]
    (sleep,) = processes.descendants(deep.pid)
    assert child.pid in found
    assert found.index(deep.pid) < found.index(sleep.pid)
    for process in (sleep, processes.find_process(deep.pid)):
        assert process is not None
        processes.signal_and_continue(process, signal.SIGKILL)
    deep.wait()


def test_a_kernel_that_gives_no_orphans_is_no_reason_not_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(option: int, value: int) -> None:
        raise OSError(number, "as a kernel says it")

    monkeypatch.setattr(processes, "_prctl", refuse)
    number = errno.EINVAL  # gVisor's answer
    processes.adopt_orphans()
    number = errno.EPERM
    with pytest.raises(PermissionError):
        processes.adopt_orphans()
