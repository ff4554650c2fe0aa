"""torch.distributed's process groups of torch_xla in a rehearsal.

Upstream, `xla://` does not work for every script: if torch elastic does not share its store, it
keeps MASTER_PORT until the process ends, so that a later `env://` cannot use it. So it is replaced,
as the stores of `env://` and `tcp://` are (`backends.rehearsal.c10d_stores`).
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch_xla.distributed.xla_backend import ProcessGroupXla  # registers what is replaced here

from tpunb.backends.rehearsal.c10d_stores import ProcessGroupStores
from tpunb.backends.rehearsal.wire import Wire


def replace_xla_rendezvous(wire: Wire, stores: ProcessGroupStores) -> None:
    """Replace torch_xla's `xla://`."""

    def handler(
        url: str, timeout: timedelta = default_pg_timeout, **kwargs: object
    ) -> Iterator[tuple[Store, int, int]]:
        """`pjrt_rendezvous_handler`: for init_method="xla://"."""
        stores.meet("xla")
        world_size = stores.world_size
        yield stores.own_keys(world_size, timeout), wire.rank, world_size

    # By its module name, because the package's attribute of that name is a function.
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous._rendezvous_handlers["xla"] = handler


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
