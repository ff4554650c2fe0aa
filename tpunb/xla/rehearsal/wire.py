"""The wire between rehearsal ranks, on which they agree on a call and exchange tensors.

Large tensors go over a private gloo group, built directly on the run's store, so that the user's
own process groups are undisturbed; everything else goes over `transport.Mesh`, or, between hosts,
over gloo as well.

Before each exchange the ranks compare their calls, because gloo ends the process with an uncaught
C++ exception when two messages differ in size (measured, torch 2.9).
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch

from tpunb.runs import heartbeat
from tpunb.xla.rehearsal import divergence
from tpunb.xla.rehearsal.agent import Agent
from tpunb.xla.rehearsal.buffers import heap, memory
from tpunb.xla.rehearsal.call import RankCall, circumstances, describe_mismatch, running_line
from tpunb.xla.rehearsal.divergence import ProgramHashes, programs
from tpunb.xla.rehearsal.errors import CollectiveError, LaunchMismatchError, MismatchError
from tpunb.xla.rehearsal.launches import ROOM as LAUNCHES_ROOM
from tpunb.xla.rehearsal.launches import find_difference, launches
from tpunb.xla.rehearsal.ranks import describe_ranks
from tpunb.xla.rehearsal.stats import collective_stats, size_of
from tpunb.xla.rehearsal.waiting import Connections, WaitTimes

TIMEOUT = 300.0
"""Seconds that a rank waits for the others in a collective."""
_NOTHING = torch.empty(0, dtype=torch.uint8)
HEADER = struct.Struct("<16sqQQQIIQ")
"""Digest of the call, bytes of the payload, hashes of the programs, of the line and of the
launches, and the number of launches. 64 bytes, so that the payload is aligned for any type."""


class Wire:
    """Exchanges CPU tensors among the ranks of a run.

    Nothing is connected before the first collective.
    """

    def __init__(self, agent: Agent, timeout: float, times: WaitTimes | None = None) -> None:
        self.rank = agent.rank
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
        self, call: RankCall, members: Sequence[int], payload: torch.Tensor | None = None
    ) -> Iterator[list[int]]:
        """A block in which `members` exchange tensors, after they have agreed on `call`.

        Waits for all members. `payload` is a flat tensor that will be exchanged in the block: up
        to a few megabytes it is sent with the agreement, so that the exchange takes no time.
        Yields the payload sizes of all members in bytes. A rank that leaves the block with an
        exception takes part in no later collective, because the ranks no longer agree.

        Raises MismatchError on every rank if the calls differ, PeerLostError or
        WaitedTooLongError if a rank does not take part, DeadlockError if ranks wait for each
        other.
        """
        if os.getpid() != self._pid:
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
                sizes = self._agree(call, members, payload)
                met = time.perf_counter()
                yield sizes
                size = size_of(call.tensors) if call.tensors else _size(payload)
                collective_stats.add(call.operation, size, met - begun, time.perf_counter() - met)
            for watcher in collective_stats.watchers:
                watcher(call, size, self._connections.history.last_line)
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
                "others waited in it. `xm.save` still works, because it needs no other rank"
            )
            raise
        finally:
            self._inside.discard(threading.get_ident())

    def leave(self) -> None:
        """Publish that this rank has left the train cell, so that no rank in it waits for it."""
        self._connections.leave(launches.described(), final=False)

    def departed(self, ranks: Sequence[int]) -> list[int]:
        """The ranks among these that have left the train cell."""
        return self._connections.departed(ranks)

    def end(self) -> None:
        """At the end of the process: publish that this rank makes no more collective calls.

        Waits for threads that are in a collective, which may still take place. Raises the first
        error of this rank, even if the user's code caught it, and LaunchMismatchError if this rank
        and one that has left before ran different programs.
        """
        while self._inside - {threading.get_ident()}:
            time.sleep(0.01)
        described = self._connections.leave(launches.described(), final=True)
        if self._error is not None:
            raise self._error
        for rank, other in described.items():
            difference = find_difference({self.rank: launches.described(), rank: other}, final=True)
            if difference is not None and difference.certain:
                raise LaunchMismatchError(difference.text)
            if difference is not None:
                divergence.print_warning(difference.text)

    def _agree(
        self, call: RankCall, members: Sequence[int], payload: torch.Tensor | None
    ) -> list[int]:
        size = _size(payload)
        hashes, line = programs.begin_collective(), running_line()
        line_hash = line.hash() if line else 0
        self._sent = None
        if len(members) == 1:
            self._connections.history.add(line, {self.rank: line_hash})
            return [size]
        header = HEADER.pack(call.digest, size, *hashes, line_hash, launches.hash, launches.count)
        mesh = self._connections.exchange_headers(header, payload, members, call)
        headers = [HEADER.unpack_from(mesh.header(member)) for member in members]
        if len({digest for digest, *_ in headers}) > 1:
            self._raise_mismatch(call, members)
        line_hashes = [row[5] for row in headers]
        self._connections.history.add(line, dict(zip(members, line_hashes, strict=True)))
        self._warn_of_order(call)
        all_hashes = [ProgramHashes(*row[2:5]) for row in headers]
        if programs.differ(call, members, all_hashes):
            self._warn_of_programs(call, members)
        if len({row[6:] for row in headers}) > 1:
            self._compare_launches(call, members)
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
        parts = self.all_gather(_tensor(padded), members, call)
        calls = {
            member: RankCall.from_description(_bytes(part)[: int(length)])
            for member, part, length in zip(members, parts, lengths, strict=True)
        }
        raise MismatchError(describe_mismatch(calls))

    def _compare_launches(self, call: RankCall, members: Sequence[int]) -> None:
        padded = launches.described().encode().ljust(LAUNCHES_ROOM)
        parts = self.all_gather(_tensor(padded), members, call)
        described = {
            member: _bytes(part).decode() for member, part in zip(members, parts, strict=True)
        }
        difference = find_difference(described, final=False)
        if difference is not None and difference.certain:
            raise LaunchMismatchError(difference.text)
        if len({json.loads(text)[0] for text in described.values()}) == 1:
            launches.agree()
            if difference is not None and self.rank == min(members):
                divergence.print_warning(difference.text)

    def _warn_of_order(self, call: RankCall) -> None:
        history = self._connections.history
        if history.swapped is None or self._order_warned:
            return
        self._order_warned = True
        rank, other = history.swapped
        if self.rank == rank:
            divergence.print_warning(
                f"two ranks made the same call, {call}, twice in a different order (a warning, "
                "once):\n"
                f"  {describe_ranks([rank])} first at {history.line_before}\n"
                f"  {describe_ranks([other])} first at {history.last}\n"
                "  The numbers of the two calls are mixed up. Call collectives in the same order "
                "on every rank."
            )

    def _warn_of_programs(self, call: RankCall, members: Sequence[int]) -> None:
        described = self.all_gather(_tensor(programs.described()), members, call)
        if self.rank == min(members):
            texts = dict(zip(members, map(_bytes, described), strict=True))
            if text := programs.describe_difference(call, texts):
                divergence.print_warning(text)

    # The following methods are called in a block of `exchange`.

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
