"""The wire of a rehearsal: what ranks agree on and exchange.

What is large goes over a private gloo group, built directly on a store of the torch elastic
agent, so that the user's own process groups are undisturbed; all else by `mesh`. All ranks are
on one machine.

Before each exchange the ranks compare what they are about to do, because gloo ends the process
with an uncaught C++ exception when two messages differ in size (measured, torch 2.9).
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from tpunb.worker import pulse
from tpunb.worker.rehearsal import divergence, heap, tally
from tpunb.worker.rehearsal.calls import Call, disagreement, where
from tpunb.worker.rehearsal.errors import CollectiveError, MismatchError
from tpunb.worker.rehearsal.transfer import memory
from tpunb.worker.rehearsal.waiting import Others

TIMEOUT = 300.0
"""Seconds that a rank waits for the others in a collective."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
HEADER = struct.Struct("<16sqQQI20x")
"""Digest of the call, bytes that the rank brings, what it computes, the line; 64 in all, so
that what follows is aligned for any type."""


class Wire:
    """Exchanges CPU tensors among the ranks of a run.

    `address` and `port` are those of the agent's store; nothing connects to it before the
    first collective. `attempt` keeps the keys of a restarted run apart.
    """

    def __init__(self, rank: int, address: str, port: int, attempt: int, timeout: float) -> None:
        self.rank = rank
        self._others = Others(rank, address, port, attempt, timeout)
        self._pid = os.getpid()
        self._broken: str | None = None
        self._brought: torch.Tensor | None = None
        """What this rank brings to the present collective, if it has travelled already."""
        self._parts: dict[int, torch.Tensor] = {}
        """Then, the bytes that each rank has brought."""

    @contextlib.contextmanager
    def together(
        self,
        call: Call,
        members: Sequence[int],
        brought: torch.Tensor | None = None,
    ) -> Iterator[list[int]]:
        """A block in which `members` exchange tensors, after they have agreed on `call`.

        Waits for all of them. `brought` is a flat tensor that will be exchanged in the block:
        if it is no more than some megabytes, it travels with the agreement, and the exchange
        takes no more time.
        Gives how many bytes each one brings. Whoever leaves the block in the middle takes part
        in no later collective: the ranks no longer agree on what comes next.

        Raises MismatchError on every rank, which says which rank brought what; PeerLostError
        or WaitedTooLongError when a rank does not come.
        """
        if os.getpid() != self._pid:
            raise CollectiveError(
                f"{call} was called in a child process of rank {self.rank} (a DataLoader "
                "worker?): only the rank itself can take part in a collective"
            )
        if self._broken is not None:
            raise CollectiveError(f"{call} cannot run: {self._broken}")
        pulse.watch()
        try:
            with pulse.collective():
                begun = time.perf_counter()
                sizes = self._agree(call, members, brought)
                met = time.perf_counter()
                yield sizes
                size = tally.size_of(call.tensors) if call.tensors else _size(brought)
                tally.mine.add(call.operation, size, met - begun, time.perf_counter() - met)
            heap.mine.tidy()
        except MismatchError:
            raise  # every rank has got it: they are together still
        except CollectiveError as error:
            self._broken = f"an earlier collective failed: {error}"
            raise
        except BaseException as error:
            self._broken = (
                f"rank {self.rank} left {call} by {type(error).__name__} while the others "
                "waited in it. `xm.save` still works, it needs no other rank"
            )
            raise

    def leave(self) -> None:
        """Say that this rank makes no collective call any more: others need not wait for it."""
        self._others.leave()

    def _agree(self, call: Call, members: Sequence[int], brought: torch.Tensor | None) -> list[int]:
        size = _size(brought)
        programs, line = divergence.mine.take(), where()
        mark = line.mark() if line else 0
        self._brought = None
        if len(members) == 1:
            self._others.trail.add(line, [mark])
            return [size]
        header = HEADER.pack(call.digest, size, *programs, mark)
        mesh = self._others.tell(header, brought, members, call)
        headers = [HEADER.unpack_from(mesh.header(member)) for member in members]
        if len({digest for digest, *_ in headers}) > 1:
            self._explain_mismatch(call, members)
        self._others.trail.add(line, [mark for *_, mark in headers])
        marks = [divergence.Marks(*marks) for _, _, *marks, _ in headers]
        if divergence.mine.differ(call, members, marks):
            self._tell_of_programs(call, members)
        sizes = [length for _, length, *_ in headers]
        if max(sizes) <= mesh.room:
            self._brought = brought
            self._parts = {
                member: mesh.part(member, length, HEADER.size)
                for member, length in zip(members, sizes, strict=True)
            }
        return sizes

    def _explain_mismatch(self, call: Call, members: Sequence[int]) -> NoReturn:
        described = call.described(self._others.trail.apart)
        lengths = self.all_gather(torch.tensor([len(described)]), members, call)
        padded = described.ljust(int(max(lengths)), b"\0")
        parts = self.all_gather(_tensor(padded), members, call)
        calls = {
            member: Call.from_description(_bytes(part)[: int(length)])
            for member, part, length in zip(members, parts, lengths, strict=True)
        }
        raise MismatchError(disagreement(calls))

    def _tell_of_programs(self, call: Call, members: Sequence[int]) -> None:
        described = self.all_gather(_tensor(divergence.mine.described()), members, call)
        if self.rank == min(members):
            texts = dict(zip(members, map(_bytes, described), strict=True))
            divergence.say(divergence.mine.tell(call, texts))

    # The following are called in a block of `together`.

    def all_reduce(self, flat: torch.Tensor, members: Sequence[int], call: Call) -> None:
        """Add up a flat tensor over `members`, in place."""
        if len(members) == 1 or flat.numel() == 0:
            return
        if flat is self._brought:
            first, *others = self.all_gather(flat, members, call)
            torch.add(first, others[0], out=flat)
            for other in others[1:]:
                flat.add_(other)
            self._brought = None
            return
        backend, group = self._others.gloo(members, call)
        self._others.wait(backend.allreduce([flat]), group, call)

    def all_gather(
        self, flat: torch.Tensor, members: Sequence[int], call: Call
    ) -> list[torch.Tensor]:
        """The flat tensors of all `members`, in their order."""
        if len(members) == 1:
            return [flat]
        if flat is self._brought:
            return [self._parts[member].view(flat.dtype) for member in members]
        if flat.numel() == 0:
            return [flat] * len(members)
        backend, group = self._others.gloo(members, call)
        gathered = memory.empty(len(members) * flat.numel(), flat.dtype)
        self._others.wait(backend._allgather_base(gathered, flat), group, call)
        return list(gathered.split(flat.numel()))

    def all_to_all(
        self,
        flat: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        members: Sequence[int],
        call: Call,
    ) -> torch.Tensor:
        """Cut `flat` into parts of the lengths `sent`, one for each of `members`, 0 for none.

        What they sent to this rank, joined in their order; its parts' lengths are `received`.
        """
        if len(members) == 1:
            return flat.clone()
        if flat is self._brought and len({*sent, *received}) == 1:
            parts = [part.split(sent[0]) for part in self.all_gather(flat, members, call)]
            return torch.cat([part[list(members).index(self.rank)] for part in parts])
        backend, group = self._others.gloo(members, call)
        result = memory.empty(sum(received), flat.dtype)
        self._others.wait(backend.alltoall_base(result, flat, received, sent), group, call)
        return result

    def all_gather_bytes(self, data: bytes, members: Sequence[int], call: Call) -> list[bytes]:
        """What all `members` bring, of any length. A block of `together` in itself."""
        brought = _tensor(data)
        with self.together(call, members, brought) as sizes:
            if self._brought is None:
                brought = _tensor(data.ljust(max(sizes), b"\0"))
            parts = self.all_gather(brought, members, call)
        return [_bytes(part)[:size] for part, size in zip(parts, sizes, strict=True)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.itemsize


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy())
