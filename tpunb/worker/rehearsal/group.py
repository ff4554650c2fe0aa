"""Some ranks, connected with each other: by sockets, and over gloo for what is large."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from tpunb.worker.rehearsal.mesh import Mesh

_GLOO: Any = ProcessGroupGloo
"""Its type stubs do not describe what it has (torch 2.9)."""


class Group:
    """Some ranks, connected with each other."""

    def __init__(
        self,
        name: str,
        members: tuple[int, ...],
        pids: dict[int, int],
        store: Store,
        mesh: Mesh,
    ) -> None:
        self.name = name
        self.members = members
        self.pids = pids
        self.store = store
        self.mesh = mesh
        self.backend: Any = None
        """gloo's, once it was needed."""
        self.exchanges = 0
        """How many there have been: the same number on all ranks."""

    def connect(self, rank: int, timeout: float) -> None:
        """Over gloo, when all members do: milliseconds. RuntimeError after `timeout` seconds."""
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

    gloo writes it to the C++ stdout, without a way to turn it off (torch 2.8, 2.9). Whatever
    else is written meanwhile passes.
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
