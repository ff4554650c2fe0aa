"""torch elastic's agent as a rank sees it: the numbers of this rank, and the store of the run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from tpunb.backends.rehearsal.board import Board
from tpunb.utils import addresses, env_vars
from tpunb.utils.errors import SetupError
from tpunb.utils.name_service import only_hosts_file

_boards: list[Board] = []
"""Keeps boards alive: torch's own objects for a store do not keep its Python methods alive."""


@dataclass(frozen=True)
class Agent:
    """The facts about a rank and its run that are in its environment."""

    rank: int
    world_size: int
    address: str
    port: int
    """The port on which torch elastic serves its store."""
    attempt: int
    """Part of the keys in the store, to keep those of a restarted run separate."""
    board: int | None
    """The descriptor of the memory in which the ranks of one host have a store of their own."""

    @classmethod
    def from_environment(cls, rank: int, world_size: int, *, hosts: int = 1) -> Agent:
        """Read MASTER_ADDR, MASTER_PORT and TORCHELASTIC_RESTART_COUNT.

        Raises SetupError if torch elastic serves no store.
        """
        env = os.environ
        if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise SetupError(
                "rehearsal ranks need torch elastic's store, which is not shared with this process "
                "(TORCHELASTIC_USE_AGENT_STORE is not True): unset "
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE, or start with plain "
                "`torchrun --nproc-per-node=N`"
            )
        attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        board = env.get(env_vars.BOARD) if hosts == 1 else None
        place = env["MASTER_ADDR"], int(env["MASTER_PORT"])
        return cls(rank, world_size, *place, attempt, None if board is None else int(board))

    def open_store(self, timeout: timedelta) -> Store:
        """Open the store of this run: the board, or torch elastic's own if there is none."""
        if self.board is not None:
            _boards.append(Board(self.board, timeout))
            return _boards[-1]
        _, numeric = addresses.resolve(self.address, self.port)
        with only_hosts_file():
            return TCPStore(numeric, self.port, is_master=False, timeout=timeout)
