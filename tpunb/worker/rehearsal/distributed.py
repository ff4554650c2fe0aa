"""What torch.distributed needs in a rehearsal: a store at which a process group's ranks meet.

Upstream, neither way is right for every script. Where torch elastic serves a store
(TORCHELASTIC_USE_AGENT_STORE), ranks only connect to MASTER_PORT: a script that sets another
port waits there for nobody, and a second init_process_group, or one after a retry, finds the
keys of the first. Where it serves none, `xla://` keeps MASTER_PORT until the process ends, so
that a later `env://` cannot have it. So both ways in are replaced here: at torch elastic's port
each init_process_group gets keys of its own in its store, at any other rank 0 serves one, as
`xmp.spawn` on a TPU has it.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch_xla.distributed.xla_backend  # noqa: F401 - registers what is replaced here
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.gloo import Wire


class Meetings:
    """Where the process groups of one rank meet those of the others.

    `address` and `port` are those of torch elastic's store; nothing connects to it before the
    first init_process_group. `attempt` keeps the keys of a restarted run apart.
    """

    def __init__(self, wire: Wire, world_size: int, address: str, port: int, attempt: int) -> None:
        self._wire = wire
        self._world_size = world_size
        self._address = address
        self._port = port
        self._attempt = attempt
        self._pid = os.getpid()
        self._count: Counter[int] = Counter()
        """How many groups of a size there have been: the same on all ranks."""

    def install(self) -> None:
        """Take the place of torch_xla's `xla://`, and of what serves `env://` and `tcp://`."""
        # By its name: the package's attribute of that name is a function.
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
        if port == self._port:
            return self._own_keys(world_size, timeout)
        return TCPStore(
            hostname,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            multi_tenant=True,
            use_libuv=use_libuv,
        )

    def _meet(self, where: str) -> None:
        """So that a rank that does not come is named, with its line, before a store waits."""
        with self._wire.together(Call("init_process_group", detail=where), range(self._world_size)):
            pass

    def _own_keys(self, world_size: int, timeout: timedelta) -> Store:
        self._count[world_size] += 1
        store = TCPStore(self._address, self._port, is_master=False, timeout=timeout)
        number = self._count[world_size]
        return PrefixStore(f"tpunb/groups/{self._attempt}/{world_size}/{number}", store)


def warn_of_bucket_views() -> None:
    """Say it when DDP is made so that torch_xla trains wrong weights, on a TPU as well.

    Seen in unmodified torch_xla 2.9 with one replica: the gradient that is ready last keeps
    its value when the bucket that it is a view of is reduced.
    """
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.gradient_as_bucket_view and self.device_type == "xla":
            warnings.warn(
                "DistributedDataParallel(gradient_as_bucket_view=True) with torch_xla 2.9 leaves "
                "one gradient of each bucket as it is on its own rank: on a TPU the ranks' "
                "weights drift apart, here they do not. Leave gradient_as_bucket_view out",
                stacklevel=2,
            )

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
