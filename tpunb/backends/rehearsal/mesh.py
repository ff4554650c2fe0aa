"""Messages between the ranks of a host: small ones over sockets, larger ones in shared memory.

A gloo message passes through two extra threads in each process, and where ranks share processors,
each hand-over waits for the scheduler. Here a rank sends and receives by itself (100 all-reduces
of 10 kB take half the processor time). Large messages go over gloo, which reduces them in fewer
steps.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from tpunb.backends.rehearsal.buffers import ALIGNMENT

INLINE = 1 << 12
"""Bytes of a socket message, at most. A rank may be one message ahead: both fit into a socket."""
SHARED = 1 << 23
"""Bytes of shared memory per group. Each rank reads the payloads of all; above about this size,
gloo is faster, because each rank reduces a share."""
_CREDENTIALS = struct.Struct("iII")
"""struct ucred: pid, uid, gid."""


class Mesh:
    """One rank's sockets to the others of a group, and the shared memory of each."""

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self.address = f"tpunb-{uuid.uuid4().hex}"
        """An abstract socket address: it is not a file, and ends with the process."""
        self.room = SHARED // len(members) // ALIGNMENT * ALIGNMENT
        """Bytes of a rank's payload, at most."""
        self._rank = rank
        self._members = members
        self._turn = 0
        self._sockets: dict[int, socket.socket] = {}
        self._received = {member: torch.empty(INLINE, dtype=torch.uint8) for member in members}
        """The message of each rank, including this one."""
        self._memory: dict[int, torch.Tensor] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(len(members))

    def connect(
        self, addresses: Mapping[int, str], pids: Mapping[int, int], timeout: float
    ) -> None:
        """Connect, once all ranks have a Mesh. Raises RuntimeError if one does not answer in time.

        `pids`: the ranks' processes. No other process gets this rank's memory.
        """
        own = os.memfd_create("tpunb")
        os.truncate(own, 2 * self.room)
        try:
            self._share(self._rank, own)
            for member in self._members:
                if member < self._rank:
                    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    peer.settimeout(timeout)
                    peer.connect(f"\0{addresses[member]}")
                    if not _is_own(peer, pids.values()):
                        peer.close()
                        raise ConnectionError(f"another process answers for rank {member}")
                    self._greet(peer, own, f"rank {member}")
                elif member > self._rank:
                    self._greet(self._accept(pids.values(), timeout), own, "another rank")
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(str(error)) from error
        finally:
            os.close(own)
            self._listener.close()

    def _accept(self, pids: Collection[int], timeout: float) -> socket.socket:
        """Accept the next rank. Any process can connect: /proc/net/unix has the address."""
        deadline = time.monotonic() + timeout
        while True:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            peer, _ = self._listener.accept()
            if _is_own(peer, pids):
                peer.settimeout(timeout)
                return peer
            peer.close()

    def _greet(self, peer: socket.socket, own: int, who: str) -> None:
        socket.send_fds(peer, [str(self._rank).encode()], [own])
        name, files, *_ = socket.recv_fds(peer, 16, 1)
        if not files:
            peer.close()
            raise ConnectionError(f"{who} has closed the connection")
        self._sockets[int(name)] = peer
        self._share(int(name), files[0])
        os.close(files[0])

    def _share(self, member: int, file: int) -> None:
        memory = mmap.mmap(file, 2 * self.room)
        self._memory[member] = torch.frombuffer(memory, dtype=torch.uint8)

    def send(self, header: bytes, payload: torch.Tensor | None, timeout: float) -> Arrival:
        """Send to all ranks, and receive from them. `payload`: a flat tensor, sent if it fits."""
        self._turn ^= 1
        own = self._received[self._rank]
        own.numpy().data[: len(header)] = header
        size = 0 if payload is None else payload.numel() * payload.itemsize
        length = len(header)
        if payload is not None and size <= self.room:
            self.part(self._rank, size, length)[:] = payload.view(torch.uint8)
            length += size if self._is_inline(size, length) else 0
        return Arrival(self._sockets, own.numpy().data[:length], self._received, timeout)

    def header(self, member: int) -> memoryview:
        """The message received from a rank, which begins with its header."""
        return self._received[member].numpy().data

    def part(self, member: int, size: int, header: int) -> torch.Tensor:
        """The payload of a rank. Valid until the next message.

        Messages use the halves of the memory in turn: a rank that sends the next message has
        read this one, and a rank that writes to this half again has received the next one.
        """
        if self._is_inline(size, header):
            return self._received[member][header : header + size]
        begin = self._turn * self.room
        return self._memory[member][begin : begin + size]

    @staticmethod
    def _is_inline(size: int, header: int) -> bool:
        return header + size <= INLINE


def _is_own(peer: socket.socket, pids: Collection[int]) -> bool:
    """True if the other end is one of these processes, by the credentials that the kernel gives."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid in pids and uid == os.getuid()


class Arrival:
    """A message on its way to the others, and theirs to this rank. Like torch.distributed.Work."""

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        message: memoryview,
        received: Mapping[int, torch.Tensor],
        timeout: float,
    ) -> None:
        self._missing = dict(sockets)
        self._received = received
        self._deadline = time.monotonic() + timeout
        self._error = ""
        for peer in sockets.values():
            peer.settimeout(timeout)
            try:
                peer.send(message)
            except (ConnectionError, TimeoutError) as error:
                self._error = str(error)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all. Raises RuntimeError if one does not arrive in time, or its rank has ended.

        Exceptions of any type that the user's signal handlers raise pass through. So this waits
        with poll, which reports a time-out without an exception.
        """
        milliseconds = None if timeout is None else timeout.total_seconds() * 1000
        for member, peer in list(self._missing.items()):
            if self._error:
                break
            arrival = select.poll()
            arrival.register(peer, select.POLLIN)
            if not arrival.poll(milliseconds):
                if time.monotonic() > self._deadline:
                    self._error = "timed out"
                raise RuntimeError("not yet")
            try:
                if not peer.recv_into(self._received[member].numpy().data):
                    self._error = f"rank {member} has closed its end"
            except ConnectionError as error:
                self._error = str(error)
            else:
                del self._missing[member]
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        """True if it has failed or all messages have arrived."""
        return bool(self._error) or not self._missing


_GLOO: Any = ProcessGroupGloo
"""Untyped, because the type stubs lack members that this module uses (torch 2.9)."""


class Group:
    """Ranks that are connected with each other: by a mesh, and by gloo as soon as it is needed."""

    def __init__(
        self, name: str, members: tuple[int, ...], pids: dict[int, int], store: Store, mesh: Mesh
    ) -> None:
        self.name = name
        self.members = members
        self.pids = pids
        self.store = store
        self.mesh = mesh
        self.backend: Any = None
        """The ProcessGroupGloo, or None before `connect_gloo`."""
        self.exchanges = 0
        """The number of exchanges so far; equal on all ranks."""

    def connect_gloo(self, rank: int, timeout: float) -> None:
        """Connect by gloo, as all members must, in milliseconds. RuntimeError after `timeout` s."""
        options = _GLOO._Options()
        options._devices = [_GLOO.create_device(hostname="127.0.0.1")]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout)
        with _without_gloo_lines():
            self.backend = _GLOO(
                PrefixStore("gloo", self.store),
                self.members.index(rank),
                len(self.members),
                options,
            )


@contextlib.contextmanager
def _without_gloo_lines() -> Iterator[None]:
    """Keep "[Gloo] Rank 0 is connected to …" out of a rank's output.

    gloo writes this line to the C++ stdout, and has no option against it (torch 2.8, 2.9). Other
    output is passed on.
    """
    kept = os.dup(1)
    caught = os.memfd_create("stdout")
    os.dup2(caught, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        size = os.lseek(caught, 0, os.SEEK_END)
        lines = os.pread(caught, size, 0).splitlines(keepends=True)
        rest = b"".join(line for line in lines if not line.startswith(b"[Gloo]"))
        if rest:
            os.write(1, rest)
        os.close(caught)
        os.close(kept)
