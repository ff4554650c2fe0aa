"""What torch_xla's collectives do in a rehearsal: XLA tensor → CPU → gloo → XLA tensor.

Each has the signature of what it replaces (torch_xla 2.8, 2.9), so that torch_xla's own Python
code calls it unchanged. What XLA's compiler or torch_xla refuses on a TPU is refused here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tpunb.worker.rehearsal import functional
from tpunb.worker.rehearsal.gather import AllGather
from tpunb.worker.rehearsal.gloo import Wire
from tpunb.worker.rehearsal.peers import Peers
from tpunb.worker.rehearsal.permute import Exchange
from tpunb.worker.rehearsal.reduce import AllReduce
from tpunb.worker.rehearsal.rendezvous import Rendezvous
from tpunb.worker.rehearsal.scatter import ReduceScatter


@dataclass(frozen=True)
class Collectives:
    """The rehearsed collectives of one rank, by the names of what they replace."""

    xlac: dict[str, Callable[..., Any]]
    """Attributes of torch_xla._XLAC."""
    operators: dict[str, Callable[..., Any]]
    """Of torch.ops._c10d_functional, for XLA tensors."""
    model: dict[str, Callable[..., Any]]
    """Attributes of torch_xla.core.xla_model."""


def collectives(wire: Wire, world_size: int) -> Collectives:
    """Those of the rank at this end of the wire."""
    peers = Peers(wire, world_size)
    reduce, gather = AllReduce(peers), AllGather(peers)
    scatter, exchange = ReduceScatter(peers), Exchange(peers)
    xlac: dict[str, Callable[..., Any]] = {
        "_xla_all_reduce": reduce.new,
        "_xla_all_reduce_inplace": reduce.in_place,
        "_xla_all_gather": gather.new,
        "_xla_all_gather_out": gather.out,
        "_xla_all_gather_coalesced": gather.coalesced,
        "_xla_all_gather_coalesced_out": gather.coalesced_out,
        "_xla_reduce_scatter": scatter.new,
        "_xla_reduce_scatter_out": scatter.out,
        "_xla_reduce_scatter_coalesced": scatter.coalesced,
        "_xla_reduce_scatter_coalesced_out": scatter.coalesced_out,
        "_xla_all_to_all": exchange.all_to_all,
        "_xla_collective_permute": exchange.permute,
        "_set_all_reduce_token": peers.layouts.set_token,
    }
    operators = functional.operators(reduce, gather, scatter, exchange)
    model: dict[str, Callable[..., Any]] = {
        "_all_gather_using_all_reduce": gather.pinned,
        "xla_rendezvous": Rendezvous(peers).meet,
    }
    return Collectives(xlac, operators, model)
