"""xm.rendezvous in a rehearsal, on which xm.mesh_reduce and xm.do_on_ordinals are built."""

from __future__ import annotations

from collections.abc import Sequence

import torch_xla
import torch_xla.runtime as xr

from tpunb.worker.rehearsal.calls import Call
from tpunb.worker.rehearsal.compiled import left_to_dynamo
from tpunb.worker.rehearsal.peers import Peers


class Rendezvous:
    """Every rank gets what all have brought, as bytes."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    @left_to_dynamo
    def meet(
        self,
        payload: bytes = b"",
        ordinals: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> list[bytes]:
        """`xm.xla_rendezvous`: runs what is pending, waits for all ranks, their payloads."""
        if ordinals and len(ordinals) != xr.global_device_count():
            raise ValueError("Only global rendezvous is supported")
        if not isinstance(payload, bytes):
            raise TypeError(f"`payload` must be bytes, not {type(payload)}")
        torch_xla.sync()
        call = Call("rendezvous", label=repr(tag) if tag else "")
        wire, world = self.peers.wire, self.peers.world
        with wire.together(call, world, len(payload)) as sizes:
            return wire.all_gather_bytes(payload, sizes, world, call)
