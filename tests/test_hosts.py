"""The hosts that tests use are what they say: apart, named, and cut off without a word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import hosts
from tests.fakes.hosts import Pod

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 2).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
SERVE = """
import socket
server = socket.create_server(("", 4000))
print("serving", flush=True)
while True:
    server.accept()
"""


@pytest.fixture
def pod(starts_processes: None, tmp_path: Path) -> Iterator[Pod]:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    with Pod(2, tmp_path) as pod:
        yield pod


def _connect(pod: Pod, name: str) -> str:
    return pod[0].run([sys.executable, "-c", CONNECT, name, "4000"]).stdout.strip()


def test_hosts_know_each_other_by_name_until_a_link_is_cut(pod: Pod) -> None:
    server = pod[1].popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"serving\n"
    assert _connect(pod, "h1") == "connected"
    pod[1].cut()
    assert _connect(pod, "h1") == "TimeoutError"
    pod[1].mend()
    assert _connect(pod, "h1") == "connected"
    assert server.pid in pod[1].processes()
    assert server.pid not in pod[0].processes()
    pod[1].kill()
    assert server.wait(10) == -9
    assert _connect(pod, "h1") == "ConnectionRefusedError"
    server.stdout.close()


def test_a_host_has_a_name_names_for_others_and_a_small_disk_of_its_own(
    pod: Pod, tmp_path: Path
) -> None:
    assert pod[1].run(["hostname"]).stdout == "h1\n"
    pod[1].know({"only": "10.0.0.1"})
    assert pod[1].run(["cat", "/etc/hosts"]).stdout == "10.0.0.1 only\n"
    folder = tmp_path / "disk"
    folder.mkdir()
    pod[1].small_disk(folder, "64k")
    assert "No space" in pod[1].run(["dd", "if=/dev/zero", f"of={folder}/a", "bs=128k"]).stderr
    assert pod[1].path(folder / "a").stat().st_size == 65536
    assert pod[0].run(["ls", str(folder)]).stdout == ""
