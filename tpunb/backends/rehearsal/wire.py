"""The wire between rehearsal ranks, on which they agree on a call and exchange tensors.

Large tensors go over a private gloo group, built directly on the run's store, so that the user's
own process groups are undisturbed; everything else goes over `transport.Mesh`.

Before each exchange the ranks compare their calls, because gloo ends the process with an uncaught
C++ exception when two messages differ in size (measured, torch 2.9).
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, Protocol

import torch
from torch._C._distributed_c10d import Work

from tpunb.backends.rehearsal import errors
from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.buffers import heap, memory
from tpunb.backends.rehearsal.call import RankCall, circumstances, describe_mismatch, running_line
from tpunb.backends.rehearsal.errors import CollectiveError, ExchangeFailedError, MismatchError
from tpunb.backends.rehearsal.stats import collective_stats, size_of
from tpunb.backends.rehearsal.waiting import Connections, WaitTimes
from tpunb.runs import heartbeat
from tpunb.utils import processes
from tpunb.utils.text import describe_ranks

TIMEOUT = 300.0
"""Seconds that a rank waits for the others in a collective."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
REDUCED_AS = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""The types in which a TPU's values are reduced, if not in their own: as a TPU does, or because
gloo lacks their own."""
HEADER = struct.Struct("<16sqIIQQQQ")
"""Digest of the call, bytes of the payload, hash of the line, and `Comparison.begin_collective`'s
numbers. 64 bytes, so that the payload is aligned for any type."""

Numbers = tuple[int, int, int, int, int]
"""What a `Comparison` compares: a number of 32 bits, and four of 64."""


class Comparison(Protocol):
    """What ranks compare at each collective, besides the call itself."""

    def begin_collective(self) -> Numbers:
        """The numbers of this rank at the collective that begins."""
        ...

    def compare(
        self, wire: Wire, call: RankCall, members: Sequence[int], numbers: Sequence[Numbers]
    ) -> None:
        """Compare the numbers of all members, in a block of `exchange`. Equal on all members.

        Raises MismatchError on every rank if the ranks cannot continue.
        """
        ...

    def described(self) -> str:
        """What a rank that leaves publishes, for `compare_departed`."""
        ...

    def compare_departed(self, rank: int, departed: Mapping[int, str]) -> None:
        """Compare this rank at its end with those that ended before. Raises MismatchError."""
        ...


class NoComparison:
    """A `Comparison` of nothing: the calls alone decide whether ranks agree."""

    def begin_collective(self) -> Numbers:
        """Zeros."""
        return (0, 0, 0, 0, 0)

    def compare(
        self, wire: Wire, call: RankCall, members: Sequence[int], numbers: Sequence[Numbers]
    ) -> None:
        """Do nothing."""

    def described(self) -> str:
        """Nothing."""
        return ""

    def compare_departed(self, rank: int, departed: Mapping[int, str]) -> None:
        """Do nothing."""


class Wire:
    """Exchanges CPU tensors among the ranks of a run.

    Nothing is connected before the first collective.
    """

    def __init__(
        self,
        agent: Agent,
        timeout: float,
        times: WaitTimes | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self.rank = agent.rank
        self._comparison = NoComparison() if comparison is None else comparison
        self._connections = Connections(agent, timeout, times)
        self._pid = os.getpid()
        self._broken: str | None = None
        self._error: CollectiveError | None = None
        """The first error, even if the user's code caught it: a TPU would not have continued."""
        self._one_at_a_time = threading.RLock()
        self._order_warned = False
        self._inside: set[int] = set()
        """Threads that are in a collective."""
        self._sent: torch.Tensor | None = None
        """This rank's payload of the current collective, if it was sent with the agreement."""
        self._payloads: dict[int, torch.Tensor] = {}
        """In this case, the bytes of each rank's payload."""

    @contextlib.contextmanager
    def exchange(
        self,
        call: RankCall,
        members: Sequence[int],
        payload: torch.Tensor | None = None,
        timeout: float | None = None,
    ) -> Iterator[list[int]]:
        """A block in which `members` exchange tensors, after they have agreed on `call`.

        Waits for all members. `payload` is a flat tensor that will be exchanged in the block: up
        to a few megabytes it is sent with the agreement, so that the exchange takes no time.
        `timeout`: seconds, if not those of the run.
        Yields the payload sizes of all members in bytes. A rank that leaves the block with an
        exception takes part in no later collective, because the ranks no longer agree.

        Raises MismatchError on every rank if the calls differ, PeerLostError or
        WaitedTooLongError if a rank does not take part, DeadlockError if ranks wait for each
        other.
        """
        if self.in_child:
            raise CollectiveError(
                f"{call} was called in a child process of {describe_ranks([self.rank])} (a "
                "DataLoader worker?): only the rank itself can take part in a collective"
            )
        if self._broken is not None:
            raise CollectiveError(f"{call} cannot run: {self._broken}")
        heartbeat.watch_counters()
        self._inside.add(threading.get_ident())
        try:
            with self._one_at_a_time, heartbeat.collective():
                begun = time.perf_counter()
                with self._connections.limited(timeout):
                    sizes = self._agree(call, members, payload)
                met = time.perf_counter()
                try:
                    yield sizes
                finally:
                    self._sent = None  # it may be a gradient, which the user's loop replaces
                size = size_of(call.tensors) if call.tensors else _size(payload)
                collective_stats.add(call.operation, size, met - begun, time.perf_counter() - met)
            for watcher in collective_stats.watchers:
                watcher(call, size)
            heap.trim()
        except MismatchError as error:
            self._error = self._error or error
            raise  # on every rank: they still agree on the next call
        except CollectiveError as error:
            if special := circumstances():
                error.args = (f"{error}\nIt was called {special}",)
            self._error = self._error or error
            self._broken = f"an earlier collective failed: {error}"
            raise
        except BaseException as error:
            self._broken = (
                f"{describe_ranks([self.rank])} left {call} with {type(error).__name__} while the "
                "others waited in it. What needs no other rank still works, as `torch.save`"
            )
            raise
        finally:
            self._inside.discard(threading.get_ident())

    def meet(self, call: RankCall, members: Sequence[int]) -> None:
        """Agree on a call that exchanges nothing. Raises as `exchange`."""
        with self.exchange(call, members):
            pass

    @property
    def in_child(self) -> bool:
        """True in a process that this rank has started."""
        return os.getpid() != self._pid or processes.spawned_by_rank

    def leave(self) -> None:
        """Publish that this rank has left the train cell, so that no rank in it waits for it."""
        self._connections.leave(self._comparison.described(), final=False)

    def departed(self, ranks: Sequence[int]) -> list[int]:
        """The ranks among these that have left the train cell."""
        return self._connections.departed(ranks)

    def end(self) -> None:
        """At the end of the process: publish that this rank makes no more collective calls.

        Waits for threads that are in a collective, which may still take place. Raises the first
        error of this rank, even if the user's code caught it, and MismatchError if the comparison
        with a rank that has left before fails.
        """
        while self._inside - {threading.get_ident()}:
            time.sleep(0.01)
        departed = self._connections.leave(self._comparison.described(), final=True)
        if self._error is not None:
            raise self._error
        self._comparison.compare_departed(self.rank, departed)

    def _agree(
        self, call: RankCall, members: Sequence[int], payload: torch.Tensor | None
    ) -> list[int]:
        size = _size(payload)
        numbers, line = self._comparison.begin_collective(), running_line()
        line_hash = line.hash() if line else 0
        self._sent = None
        if len(members) == 1:
            self._connections.history.add(line, {self.rank: line_hash})
            return [size]
        header = HEADER.pack(call.digest, size, line_hash, *numbers)
        mesh = self._connections.exchange_headers(header, payload, members, call)
        headers = [HEADER.unpack_from(mesh.header(member)) for member in members]
        if len({digest for digest, *_ in headers}) > 1:
            self._raise_mismatch(call, members)
        line_hashes = [row[2] for row in headers]
        self._connections.history.add(line, dict(zip(members, line_hashes, strict=True)))
        self._warn_of_order(call)
        self._comparison.compare(self, call, members, [row[3:] for row in headers])
        sizes = [length for _, length, *_ in headers]
        if max(sizes) <= mesh.room:
            self._sent = payload
            self._payloads = {
                member: mesh.part(member, length, HEADER.size)
                for member, length in zip(members, sizes, strict=True)
            }
        return sizes

    def _raise_mismatch(self, call: RankCall, members: Sequence[int]) -> NoReturn:
        described = call.described(self._connections.history.first_divergence)
        lengths = self.all_gather(torch.tensor([len(described)]), members, call)
        padded = described.ljust(int(max(lengths)), b"\0")
        calls = {
            member: RankCall.from_description(part[: int(length)])
            for (member, part), length in zip(
                self.gather_padded(padded, members, call).items(), lengths, strict=True
            )
        }
        raise MismatchError(describe_mismatch(calls))

    def _warn_of_order(self, call: RankCall) -> None:
        history = self._connections.history
        if history.swapped is None or self._order_warned:
            return
        self._order_warned = True
        rank, other = history.swapped
        if self.rank == rank:
            errors.print_warning(
                f"two ranks made the same call, {call}, twice in a different order (a warning, "
                "once):\n"
                f"  {describe_ranks([rank])} first at {history.line_before}\n"
                f"  {describe_ranks([other])} first at {history.last}\n"
                "  The numbers of the two calls are mixed up. Call collectives in the same order "
                "on every rank."
            )

    # The following methods are called in a block of `exchange`.

    def wait(
        self, works: Sequence[Work], members: Sequence[int], call: RankCall
    ) -> BaseException | None:
        """Wait for exchanges of all members on another group's gloo.

        Returns torch's error if it fails on all of them (of a type that gloo lacks).
        """
        try:
            for work in works:
                if len(members) == 1:
                    work.wait()
                else:
                    self._connections.wait(work, self._connections.group(members, call), call)
        except ExchangeFailedError as error:
            return error.__cause__
        return None

    def all_reduce(self, flat: torch.Tensor, members: Sequence[int], call: RankCall) -> None:
        """Sum a flat tensor over `members`, in place."""
        if len(members) == 1 or flat.numel() == 0:
            return
        if flat is self._sent:
            first, *others = self.all_gather(flat, members, call)
            torch.add(first, others[0], out=flat)
            for other in others[1:]:
                flat.add_(other)
            self._sent = None
            return
        backend, group = self._connections.gloo(members, call)
        self._connections.wait(backend.allreduce([flat]), group, call)

    def all_gather(
        self, flat: torch.Tensor, members: Sequence[int], call: RankCall
    ) -> list[torch.Tensor]:
        """The flat tensors of all `members`, in order."""
        if len(members) == 1:
            return [flat]
        if flat is self._sent:
            return [self._payloads[member].view(flat.dtype) for member in members]
        if flat.numel() == 0:
            return [flat] * len(members)
        backend, group = self._connections.gloo(members, call)
        gathered = memory.empty(len(members) * flat.numel(), flat.dtype)
        self._connections.wait(backend._allgather_base(gathered, flat), group, call)
        return list(gathered.split(flat.numel()))

    def all_to_all(
        self,
        flat: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        members: Sequence[int],
        call: RankCall,
    ) -> torch.Tensor:
        """Send each member its part of `flat`, whose lengths are `sent` (0: none).

        Returns the parts that the members sent to this rank, concatenated in order; their
        lengths are `received`.
        """
        if len(members) == 1:
            return flat.clone()
        if flat is self._sent and len({*sent, *received}) == 1:
            parts = [part.split(sent[0]) for part in self.all_gather(flat, members, call)]
            return torch.cat([part[list(members).index(self.rank)] for part in parts])
        backend, group = self._connections.gloo(members, call)
        result = memory.empty(sum(received), flat.dtype)
        self._connections.wait(backend.alltoall_base(result, flat, received, sent), group, call)
        return result

    def gather_padded(
        self, data: bytes, members: Sequence[int], call: RankCall
    ) -> dict[int, bytes]:
        """The data of each of `members`, of one length, by rank."""
        parts = self.all_gather(_tensor(data), members, call)
        return dict(zip(members, map(_bytes, parts), strict=True))

    def all_gather_bytes(self, data: bytes, members: Sequence[int], call: RankCall) -> list[bytes]:
        """The data of all `members`, of any length. Includes the block of `exchange`."""
        payload = _tensor(data)
        with self.exchange(call, members, payload) as sizes:
            if self._sent is None:
                payload = _tensor(data.ljust(max(sizes), b"\0"))
            parts = self.all_gather(payload, members, call)
        return [_bytes(part)[:size] for part, size in zip(parts, sizes, strict=True)]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _NOTHING


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.itemsize


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.numpy())
