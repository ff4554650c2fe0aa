"""What an agent listens on, and what it looks up."""

from __future__ import annotations

import socket
import time
from datetime import timedelta

from tests.support import Driver

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


def test_a_rehearsal_listens_on_the_loopback_interface_alone_and_looks_up_no_name(
    driver: Driver,
) -> None:
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

    from tpunb.worker.elastic import OneHost

    host = OneHost("run")
    met = host.next_rendezvous()
    where = met.bootstrap_store_info
    assert where is not None
    assert where.master_addr == "127.0.0.1"
    host.serve_if_asked()
    assert host._server is None
    # The system accepts at once, before the store serves.
    first = socket.create_connection((where.master_addr, where.master_port))
    deadline = time.monotonic() + 30
    while host._server is None:
        host.serve_if_asked()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    limit = timedelta(seconds=30)
    ranks = [TCPStore(where.master_addr, where.master_port, timeout=limit) for _ in range(2)]
    ranks[0].set("key", "value")
    assert ranks[1].get("key") == b"value"
    # With --retries the ranks of the next attempt find the same.
    again = host.next_rendezvous().bootstrap_store_info
    assert again == where
    first.close()
