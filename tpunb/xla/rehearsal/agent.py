"""Torch elastic's agent as a rank sees it: who this rank is, and the store of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from tpunb.utils import env_vars
from tpunb.utils.name_service import only_hosts_file
from tpunb.xla import hosts
from tpunb.xla.rehearsal.board import Board

_boards: list[Board] = []
"""Kept: torch's own objects on a store do not keep its methods, which are Python's."""


@dataclass(frozen=True)
class Agent:
    """What the environment of a rank says about it and its run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks of this host."""
    address: str
    port: int
    """Where torch elastic serves its store."""
    attempt: int
    """Keeps the keys of a restarted run separate."""

    @classmethod
    def from_environment(
        cls,
        env: Mapping[str, str],
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
    ) -> Agent:
        """Reads MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT."""
        return cls(
            rank,
            world_size,
            local_rank,
            local_world_size,
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    @property
    def one_host(self) -> bool:
        """All ranks are on this host."""
        return self.local_world_size == self.world_size

    @property
    def neighbours(self) -> range:
        """The ranks of this host: torch elastic numbers them host by host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def own_address(self) -> str:
        """The address of this host at which the other ranks reach it."""
        return "127.0.0.1" if self.one_host else hosts.own_address()

    def open_store(self, timeout: timedelta) -> Store:
        """The store of this run.

        On one host its board; torch elastic's store where torchrun is the agent, or where there
        are several hosts.
        """
        board = os.environ.get(env_vars.BOARD)
        if board is not None and self.one_host:
            _boards.append(Board(int(board), timeout))
            return _boards[-1]
        _, numeric = hosts.resolve(self.address, self.port)
        with only_hosts_file():
            return TCPStore(numeric, self.port, is_master=False, timeout=timeout)
