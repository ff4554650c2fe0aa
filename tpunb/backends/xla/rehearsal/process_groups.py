"""The stores of torch.distributed's process groups in a rehearsal.

Upstream, neither way works for every script. If torch elastic shares its store
(TORCHELASTIC_USE_AGENT_STORE), ranks only connect to MASTER_PORT: a script that sets another
port waits for a server that does not exist, and a second init_process_group, or one after a
retry, finds the keys of the first. If it does not, `xla://` keeps MASTER_PORT until the process
ends, so that a later `env://` cannot use it. So both are replaced: at torch elastic's port each
init_process_group gets keys of its own in torch elastic's store, and at any other port rank 0
serves a store, as after `xmp.spawn` on a TPU.
"""

from __future__ import annotations

import functools
import importlib
import ipaddress
import os
import socket
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch_xla.distributed.xla_backend import ProcessGroupXla  # registers what is replaced here

from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.call import RankCall
from tpunb.backends.rehearsal.wire import Wire


class ProcessGroupStores:
    """Gives the process groups of one rank their stores.

    Nothing connects to torch elastic's store before the first init_process_group.
    """

    def __init__(self, wire: Wire, agent: Agent) -> None:
        self._wire = wire
        self._agent = agent
        self._world_size = agent.world_size
        self._pid = os.getpid()
        self._count: Counter[int] = Counter()
        """The number of groups made so far, by world size; equal on all ranks."""

    def install(self) -> None:
        """Replace torch_xla's `xla://`, and the function for the store of `env://` and `tcp://`."""
        # By its module name, because the package's attribute of that name is a function.
        rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
        rendezvous._rendezvous_handlers["xla"] = self.xla_handler
        rendezvous._create_c10d_store = self.create_store

    def xla_handler(
        self, url: str, timeout: timedelta = default_pg_timeout, **kwargs: object
    ) -> Iterator[tuple[Store, int, int]]:
        """`pjrt_rendezvous_handler`: for init_method="xla://"."""
        self._meet("xla")
        yield self._own_keys(self._world_size, timeout), self._wire.rank, self._world_size

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
        if world_size == self._world_size and os.getpid() == self._pid:
            self._meet(f"port {port}")
        if port == self._agent.port:
            return self._own_keys(world_size, timeout)
        return TCPStore(
            hostname,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=_listen_here(hostname, port) if rank == 0 else None,
            use_libuv=use_libuv,
        )

    def _meet(self, where: str) -> None:
        """Meet on the wire first: unlike a store, it names a missing rank and its line."""
        with self._wire.exchange(
            RankCall("init_process_group", detail=where), range(self._world_size)
        ):
            pass

    def _own_keys(self, world_size: int, timeout: timedelta) -> Store:
        self._count[world_size] += 1
        store = self._agent.open_store(timeout)
        number = self._count[world_size]
        return PrefixStore(f"tpunb/groups/{self._agent.attempt}/{world_size}/{number}", store)


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


_pairs = 0
"""The number of running sends and receives of torch.distributed."""


def is_pairwise() -> bool:
    """True while torch.distributed sends or receives, which only two ranks do."""
    return _pairs > 0


def warn_of_pairs(world_size: int) -> None:
    """Warn of torch.distributed's send and recv if there are more than two ranks.

    torch_xla turns each into a collective_permute and runs its program at once, on two ranks, but
    XLA compiles the program for all.
    """
    warned = world_size == 2

    def replace(name: str) -> None:
        original = getattr(ProcessGroupXla, name)

        @functools.wraps(original)
        def pairwise(*args: Any, **options: Any) -> Any:
            global _pairs
            nonlocal warned
            if not warned:
                warned = True
                warnings.warn(
                    f"torch.distributed's {name} runs a program on two ranks, but XLA compiles it "
                    f"for all {world_size}: on a TPU it may wait for the others. Use "
                    "xm.collective_permute with all pairs, called on every rank",
                    stacklevel=2,
                )
            _pairs += 1
            try:
                return original(*args, **options)
            finally:
                _pairs -= 1

        setattr(ProcessGroupXla, name, pairwise)

    replace("send")
    replace("recv")


def warn_of_bucket_views() -> None:
    """Warn of a DDP option with which torch_xla trains wrong weights, on a TPU as well.

    Seen in unmodified torch_xla 2.9 with one replica: the gradient that is ready last keeps its
    value when its bucket is reduced.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.gradient_as_bucket_view and self.device_type == "xla":
            warnings.warn(
                "DistributedDataParallel(gradient_as_bucket_view=True) with torch_xla 2.9 does "
                "not reduce one gradient of each bucket: on a TPU the ranks' weights drift "
                "apart (in a rehearsal they do not). Remove gradient_as_bucket_view",
                stacklevel=2,
            )

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
