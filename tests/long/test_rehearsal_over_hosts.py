"""More of tests/xla/rehearsal/test_rehearsal_over_hosts.py, which takes longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.ranks import LOOPBACK, Ranks
from tests.fakes import hosts
from tests.fakes.hosts import Pod
from tests.xla.rehearsal.test_rehearsal_over_hosts import LISTEN, everything


def test_collectives_over_hosts_equal_those_on_one_host(ranks: Ranks) -> None:
    one = ranks.values(everything, 4)
    two = ranks.values(everything, 4, hosts=LOOPBACK)
    for rank in range(4):
        assert one[rank].pop("local") == (rank, 4, 4)
        assert two[rank].pop("local") == (rank % 2, 2, 4)
        assert two[rank] == one[rank]  # bit for bit


def test_collectives_over_hosts_without_name_resolution(ranks: Ranks, tmp_path: Path) -> None:
    if refused := hosts.why_refused():
        pytest.skip(refused)
    settings = tmp_path / "resolv.conf"
    with Pod(3) as pod:
        settings.write_text(f"nameserver {pod[2].address}\n")
        for host in pod.hosts:
            host.know({"localhost": "127.0.0.1"})
            resolver = os.path.realpath("/etc/resolv.conf")
            host.run(["mount", "--bind", str(settings), resolver], check=True)
        command = [sys.executable, "-c", LISTEN]
        with pod[2].popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"listens\n"
            found = ranks.values(everything, 4, hosts=pod.hosts[:2])
            server.terminate()
            assert server.stdout.read() == b""
    assert [rank["mesh"] for rank in found] == [6] * 4
    assert found[0]["ddp"] == found[3]["ddp"]
