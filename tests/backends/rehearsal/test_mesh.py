"""The sockets between rehearsal ranks accept no other process."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest


@pytest.fixture
def meshes() -> list[Any]:
    from tpunb.backends.rehearsal.mesh import Mesh

    return [Mesh(rank, [0, 1]) for rank in (0, 1)]


@pytest.mark.usefixtures("starts_processes")
def test_transport_gives_nothing_to_another_process(meshes: list[Any]) -> None:
    rank0, rank1 = meshes
    pids = dict.fromkeys((0, 1), os.getpid())
    address = f"\0{rank0.address}"
    connected, connects = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(address)
        os.write(connects, b"x")
        message, files, *_ = socket.recv_fds(peer, 16, 1)
        os._exit(bool(message or files))
    os.read(connected, 1)  # it is the first in the queue
    threads = [
        threading.Thread(target=mesh.connect, args=({0: rank0.address}, pids, 30.0))
        for mesh in (rank0, rank1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(stranger, 0)[1] == 0
    arrivals = [mesh.send(b"from%d" % rank, None, 30.0) for rank, mesh in enumerate((rank0, rank1))]
    for arrival in arrivals:
        arrival.wait()
    assert bytes(rank0.header(1)[:5]) == b"from1"
    assert bytes(rank1.header(0)[:5]) == b"from0"
    for peer in (*rank0._sockets.values(), *rank1._sockets.values()):
        peer.close()
    os.close(connected)
    os.close(connects)


def test_transport_rejects_a_process_that_poses_as_a_rank(meshes: list[Any]) -> None:
    impostor, rank1 = meshes
    pids = {0: os.getppid(), 1: os.getppid()}  # the impostor is this process
    with pytest.raises(RuntimeError, match="another process answers for rank 0"):
        rank1.connect({0: impostor.address}, pids, 30.0)
    impostor._listener.close()


def test_lost_connection_if_a_rank_ends_while_connecting(meshes: list[Any]) -> None:
    rank0, rank1 = meshes
    pids = dict.fromkeys((0, 1), os.getpid())

    def accept_and_end() -> None:
        peer, _ = rank0._listener.accept()
        _, files, *_ = socket.recv_fds(peer, 16, 1)
        os.close(files[0])
        peer.close()
        rank0._listener.close()

    thread = threading.Thread(target=accept_and_end)
    thread.start()
    with pytest.raises(RuntimeError, match="rank 0 has closed the connection"):
        rank1.connect({0: rank0.address}, pids, 30.0)
    thread.join()
