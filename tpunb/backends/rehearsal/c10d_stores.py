"""The stores of torch.distributed's process groups.

If torch elastic shares its store (TORCHELASTIC_USE_AGENT_STORE), ranks upstream only connect to
MASTER_PORT: a script that sets another port waits for a server that does not exist, and a second
init_process_group, or one after a retry, finds the keys of the first. If it does not, rank 0 serves
a store that a second init_process_group finds as well. So it is replaced: at torch elastic's port
each init_process_group gets keys of its own in the run's store, and at any other port rank 0 serves
one. For `file://` the ranks meet in the run's store as well: the file of an earlier group, or run,
would keep them from it. A store that the script passes stays as it is.
"""

from __future__ import annotations

import importlib
import ipaddress
import socket
from collections import Counter
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.wire import Wire


class ProcessGroupStores:
    """Gives the process groups of one rank their stores.

    Nothing connects to torch elastic's store before the first init_process_group. `wire`: that of
    a rehearsal; None on several hosts, whose ranks meet in the store alone.
    """

    def __init__(self, agent: Agent, wire: Wire | None) -> None:
        self.world_size = agent.world_size
        self._wire = wire
        self._agent = agent
        self._count: Counter[str] = Counter()
        """The number of groups made so far, by place and world size; equal on all ranks."""

    def install(self) -> None:
        """Replace torch's functions for the store of `env://` and `tcp://`, and of `file://`."""
        # By its module name, because the package's attribute of that name is a function. Checked
        # with torch 2.8 to 2.15.
        rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
        rendezvous._create_c10d_store = self.create_store
        rendezvous.FileStore = self.file_store

    def create_store(
        self,
        hostname: str,
        port: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        use_libuv: bool = True,
    ) -> Store:
        """`_create_c10d_store`: for init_method="env://" and "tcp://"."""
        if self._is_of_all(world_size):
            self.meet(f"port {port}")
        if port == self._agent.port:
            return self.own_keys(world_size, timeout)
        store = TCPStore(
            hostname,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=_listen_here(hostname, port) if rank == 0 else None,
            use_libuv=use_libuv,
        )
        # A group that was made here before may live on, and with it this server and its keys.
        return PrefixStore(self._next(f"{port}/{world_size}"), store)

    def file_store(self, path: str, world_size: int) -> Store:
        """`FileStore`, for init_method="file://"."""
        if not self._is_of_all(world_size):
            return FileStore(path, world_size)
        self.meet(f"file {path}")
        return self.own_keys(world_size, dist.default_pg_timeout)

    def _is_of_all(self, world_size: int) -> bool:
        in_child = self._wire is not None and self._wire.in_child
        return world_size == self.world_size and not in_child

    def meet(self, where: str) -> None:
        """Meet on the wire first: unlike a store, it names a missing rank and its line."""
        if self._wire is not None:
            self._wire.meet(RankCall("init_process_group", detail=where), range(self.world_size))

    def own_keys(self, world_size: int, timeout: timedelta) -> Store:
        """The keys of a new process group in the store of the run."""
        store = self._agent.open_store(timeout)
        number = self._next(str(world_size))
        return PrefixStore(f"tpunb/groups/{self._agent.attempt}/{number}", store)

    def _next(self, place: str) -> str:
        self._count[place] += 1
        return f"{place}/{self._count[place]}"


def _listen_here(hostname: str, port: int) -> int | None:
    """Open a listening socket on the address that the script names; None if that fails.

    TCPStore itself, which then opens the socket, listens on all interfaces, whatever the name.
    """
    address = "127.0.0.1" if hostname == "localhost" else hostname
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return None
    try:
        server = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except OSError:  # TCPStore shares a port that this process serves already, or reports why not
        return None
    return server.detach()
