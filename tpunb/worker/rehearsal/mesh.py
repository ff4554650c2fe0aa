"""Messages between ranks of one machine: what is small by sockets, more in memory they share.

A message of gloo passes two threads of its own in each process. Where ranks share processors,
each hand-over waits for a turn. Here a rank sends and receives by itself (100 all-reduces of 10 kB
take half the processor time). gloo reduces what is large in fewer steps: that stays with it.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from tpunb.worker.rehearsal.transfer import ALIGNMENT

INLINE = 1 << 12
"""Bytes of a message. A rank may be one message ahead: both fit into a socket."""
SHARED = 1 << 23
"""Bytes for the ranks of a group together. Each reads what all have brought: gloo, in which each
reduces a share, is faster from about here on."""


class Mesh:
    """The sockets of one rank to the others of a group, and the memory of each."""

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self.address = f"tpunb-{uuid.uuid4().hex}"
        """Where the others find this rank: no file, and it ends with the process."""
        self.room = SHARED // len(members) // ALIGNMENT * ALIGNMENT
        """Bytes that a rank can bring."""
        self._rank = rank
        self._members = members
        self._turn = 0
        self._sockets: dict[int, socket.socket] = {}
        self._received = {member: torch.empty(INLINE, dtype=torch.uint8) for member in members}
        """The message of each rank, also of this one."""
        self._memory: dict[int, torch.Tensor] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(len(members))

    def connect(self, addresses: Mapping[int, str], timeout: float) -> None:
        """When all have made theirs. RuntimeError if one does not answer in `timeout` seconds."""
        own = os.memfd_create("tpunb")
        os.truncate(own, 2 * self.room)
        try:
            self._share(self._rank, own)
            for member in self._members:
                if member < self._rank:
                    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    peer.settimeout(timeout)
                    peer.connect(f"\0{addresses[member]}")
                    self._greet(peer, own)
                elif member > self._rank:
                    self._listener.settimeout(timeout)
                    peer, _ = self._listener.accept()
                    peer.settimeout(timeout)
                    self._greet(peer, own)
        except (ConnectionError, TimeoutError) as error:
            raise RuntimeError(str(error)) from error
        finally:
            os.close(own)
            self._listener.close()

    def _greet(self, peer: socket.socket, own: int) -> None:
        socket.send_fds(peer, [str(self._rank).encode()], [own])
        name, (theirs, *_), *_ = socket.recv_fds(peer, 16, 1)
        self._sockets[int(name)] = peer
        self._share(int(name), theirs)
        os.close(theirs)

    def _share(self, member: int, file: int) -> None:
        memory = mmap.mmap(file, 2 * self.room)
        self._memory[member] = torch.frombuffer(memory, dtype=torch.uint8)

    def send(self, header: bytes, brought: torch.Tensor | None, timeout: float) -> Arrival:
        """To all, and get theirs. `brought`: a flat tensor, which travels if there is room."""
        self._turn ^= 1
        own = self._received[self._rank]
        own.numpy().data[: len(header)] = header
        size = 0 if brought is None else brought.numel() * brought.itemsize
        length = len(header)
        if brought is not None and size <= self.room:
            self.part(self._rank, size, length)[:] = brought.view(torch.uint8)
            length += size if self._is_inline(size, length) else 0
        return Arrival(self._sockets, own.numpy().data[:length], self._received, timeout)

    def header(self, member: int) -> memoryview:
        """The beginning of the message that has come from a rank."""
        return self._received[member].numpy().data

    def part(self, member: int, size: int, header: int) -> torch.Tensor:
        """The bytes that a rank has brought. They are its own again after the next message.

        Half of the memory is for every second message: whoever sends the next has done with
        this one, and who writes again has got that.
        """
        if self._is_inline(size, header):
            return self._received[member][header : header + size]
        begin = self._turn * self.room
        return self._memory[member][begin : begin + size]

    @staticmethod
    def _is_inline(size: int, header: int) -> bool:
        return header + size <= INLINE


class Arrival:
    """A message on its way to the others, and theirs. Like a `Work` of torch.distributed."""

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
        """Until all have come. RuntimeError if one does not come in this time, or has ended.

        What a signal handler of the user's raises meanwhile passes through, whatever it is: so
        the wait is poll's, which tells of the time by no exception.
        """
        patience = None if timeout is None else timeout.total_seconds() * 1000
        for member, peer in list(self._missing.items()):
            if self._error:
                break
            arrival = select.poll()
            arrival.register(peer, select.POLLIN)
            if not arrival.poll(patience):
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
        """Whether it has failed, or all have come."""
        return bool(self._error) or not self._missing
