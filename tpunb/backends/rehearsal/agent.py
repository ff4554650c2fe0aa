"""torch elastic's agent as a rank sees it: the numbers of this rank, and the store of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from tpunb.backends.rehearsal.board import Board
from tpunb.utils import addresses, env_vars
from tpunb.utils.name_service import only_hosts_file

_boards: list[Board] = []
"""Keeps boards alive: torch's own objects for a store do not keep its Python methods alive."""


@dataclass(frozen=True)
class Agent:
    """The facts about a rank and its run that are in its environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """The number of ranks on this host."""
    address: str
    port: int
    """The port on which torch elastic serves its store."""
    attempt: int
    """Part of the keys in the store, to keep those of a restarted run separate."""

    @classmethod
    def from_environment(
        cls,
        env: Mapping[str, str],
        rank: int,
        world_size: int,
        local_rank: int,
        local_world_size: int,
    ) -> Agent:
        """Read MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT."""
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
        """True if all ranks are on this host."""
        return self.local_world_size == self.world_size

    @property
    def neighbours(self) -> range:
        """The ranks of this host: torch elastic numbers them host by host."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def own_address(self) -> str:
        """The address at which the other ranks reach this host."""
        return "127.0.0.1" if self.one_host else addresses.own_address()

    def open_store(self, timeout: timedelta) -> Store:
        """Open the store of this run.

        On one host the run's board; torch elastic's store if torchrun is the agent, or if there are
        several hosts.
        """
        board = os.environ.get(env_vars.BOARD)
        if board is not None and self.one_host:
            _boards.append(Board(int(board), timeout))
            return _boards[-1]
        _, numeric = addresses.resolve(self.address, self.port)
        with only_hosts_file():
            return TCPStore(numeric, self.port, is_master=False, timeout=timeout)
