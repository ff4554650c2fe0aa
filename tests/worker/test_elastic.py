"""The sockets on which an agent listens, and its name look-ups."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support import Driver
from tpunb.runs import directory
from tpunb.runs.protocol import (
    AttemptReady,
    MessageReader,
    MessageWriter,
    OrderChannel,
    StartAttempt,
)
from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import SetupError

LOOKUPS = """
import sys
lookups = []
def note(event, args):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr",
                 "socket.getnameinfo", "socket.gethostname"):
        print("looked up", event, args, flush=True)
sys.addaudithook(note)
"""
SOCKETS = """
import os, torch, torch_xla, torch_xla.core.xla_model as xm, torch.distributed as dist
def ends(pid):
    found = []
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            pass
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in open(f"/proc/net/{table}").readlines()[1:]:
            _, local, remote, state, *rest = line.split()
            if f"socket:[{rest[5]}]" in inodes:
                found.append((table, local.partition(":")[0], state))
    return found
total = xm.all_reduce("sum", torch.ones(2, device=torch_xla.device())).tolist()
xm.all_reduce("sum", torch.ones(3 << 20, device=torch_xla.device()))  # goes over gloo
agent = ends(os.getppid())
xm.rendezvous("both have looked")
dist.init_process_group("xla", init_method="xla://")
dist.destroy_process_group()
own = [end for end in ends(os.getpid()) if end[1] != "0100007F"]
"""


def test_rehearsal_listens_on_loopback_only_and_resolves_no_name(driver: Driver) -> None:
    seen = driver.run([LOOKUPS], SOCKETS, returns=["total", "agent", "own"])
    assert seen.result.returns == {
        "total": [2.0, 2.0],
        # 127.0.0.1, which listens. A connection would show that torch's TCPStore was asked, which
        # looks the address up in reverse.
        "agent": [("tcp", "0100007F", "0A")],
        "own": [],
    }
    assert not [line for line in seen.log if "looked up" in line]
    prelude = seen.result.dir / "attempt-0" / "prelude.log"
    assert not prelude.exists() or "looked up" not in prelude.read_text()


def test_the_store_begins_to_serve_when_a_rank_connects() -> None:
    from torch.distributed import TCPStore

    from tpunb.worker.elastic import SingleHost

    host = SingleHost("run")
    met = host.next_rendezvous()
    where = met.bootstrap_store_info
    assert where is not None
    assert where.master_addr == "127.0.0.1"
    host.serve_on_first_connection()
    assert host._server is None
    # The system accepts the connection at once, before the store serves it.
    first = socket.create_connection((where.master_addr, where.master_port))
    deadline = time.monotonic() + 30
    while host._server is None:
        host.serve_on_first_connection()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    limit = timedelta(seconds=30)
    ranks = [TCPStore(where.master_addr, where.master_port, timeout=limit) for _ in range(2)]
    ranks[0].set("key", "value")
    assert ranks[1].get("key") == b"value"
    # With --retries, the ranks of the next attempt use the same store.
    again = host.next_rendezvous().bootstrap_store_info
    assert again == where
    first.close()


PORT = 29522
"""The first of the ports for the store."""


@contextlib.contextmanager
def taken(count: int) -> Iterator[None]:
    """Occupy this many of the ports."""
    with contextlib.ExitStack() as stack:
        for port in range(PORT, PORT + count):
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


@pytest.mark.parametrize(("busy", "node_rank", "port"), [(0, 0, 0), (2, 0, 2), (0, 1, None)])
def test_only_host_0_listens_at_the_next_free_port_and_tells_it(
    tmp_path: Path, busy: int, node_rank: int, port: int | None
) -> None:
    from tpunb.worker.elastic import HostOfSeveral

    run = directory.create_run(tmp_path, "nb")
    spec = RunSpec(run.id, "nb", 2, "CPU", str(tmp_path), (), (), hosts=("h0", "h1"))
    reader, writer = os.pipe()
    ours, theirs = (OrderChannel(end) for end in socket.socketpair())
    reports = MessageWriter(writer)
    told = 0 if port is None else PORT + port
    with taken(busy):
        host = HostOfSeveral(run, spec, node_rank, "127.0.0.1", PORT, theirs, reports)
        ours.send(StartAttempt(0, "10.0.0.2", 7))
        met = host.next_rendezvous().bootstrap_store_info
        assert met is not None
        assert (met.master_addr, met.master_port) == ("10.0.0.2", 7)
        assert MessageReader(reader).read() == [AttemptReady(0, told)]
        if port is None:
            host.serve_on_first_connection()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", PORT))
        else:
            socket.create_connection(("127.0.0.1", told)).close()
    host.leave()  # as in a rank
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", told or PORT))
    for end in (ours, reports):
        end.close()
    os.close(reader)


def test_without_a_free_port_for_the_store_the_ports_are_named(tmp_path: Path) -> None:
    from tpunb.worker.elastic import HostOfSeveral

    run = directory.create_run(tmp_path, "nb")
    spec = RunSpec(run.id, "nb", 2, "CPU", str(tmp_path), (), (), hosts=("h0", "h1"))
    reader, writer = os.pipe()
    ours, theirs = (OrderChannel(end) for end in socket.socketpair())
    host = HostOfSeveral(run, spec, 0, "127.0.0.1", PORT, theirs, MessageWriter(writer))
    with taken(5), pytest.raises(SetupError, match=re.escape("29522, 29523, 29524, 29525, 29526")):
        host.next_rendezvous()
    for fd in (reader, writer):
        os.close(fd)
    for channel in (ours, theirs):
        channel.close()
