"""Waiting for the other ranks, and words for why they do not come.

Where a wait is told of is torch elastic's store. Nothing is asked of it while ranks come in time.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore, Work

from tpunb.worker.rehearsal.calls import Call, disagreement
from tpunb.worker.rehearsal.errors import (
    CollectiveError,
    CrossedError,
    PeerLostError,
    WaitedTooLongError,
)
from tpunb.worker.rehearsal.group import Group
from tpunb.worker.rehearsal.mesh import Arrival, Mesh
from tpunb.worker.rehearsal.trail import Farewell, Trail, departed
from tpunb.worker.rehearsal.waits import Wait, crossed

STEP = timedelta(seconds=0.2)
"""How long a wait stays in C++, where KeyboardInterrupt cannot reach it."""
FAREWELLS = 1.0
"""Seconds in which others follow a rank that has left the train cell: they end a moment apart."""
INQUIRY = 2.0
"""Seconds that the ranks of a collective that failed have to say that they are in it."""


class Others:
    """The other ranks, as one of them waits for them.

    `address` and `port` are those of the agent's store; nothing connects to it before the
    first collective. `attempt` keeps the keys of a restarted run apart.
    """

    def __init__(self, rank: int, address: str, port: int, attempt: int, timeout: float) -> None:
        self.rank = rank
        self.trail = Trail()
        self._address = address
        self._port = port
        self._prefix = f"tpunb/rehearsal/{attempt}"
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], Group] = {}
        self._store: Store | None = None

    def group(self, members: Sequence[int], call: Call) -> Group:
        """These ranks, connected. Waits for them all the first time."""
        key = tuple(members)
        if key not in self._groups:
            self._groups[key] = self._meet(key, call)
        return self._groups[key]

    def gloo(self, members: Sequence[int], call: Call) -> tuple[Any, Group]:
        """What is connected over gloo, after all members have agreed on a call; the group."""
        group = self.group(members, call)
        if group.backend is None:
            try:
                group.connect(self.rank, self._timeout)
            except RuntimeError as error:
                self._explain(group, call, error)
        return group.backend, group

    def tell(
        self, header: bytes, brought: torch.Tensor | None, members: Sequence[int], call: Call
    ) -> Mesh:
        """Send all members a header, and what this rank brings if there is room; get theirs."""
        group = self.group(members, call)
        self.wait(group.mesh.send(header, brought, self._timeout), group, call)
        return group.mesh

    def wait(self, work: Work | Arrival, group: Group, call: Call) -> None:
        """Until an exchange has taken place. It can be interrupted."""
        group.exchanges += 1
        told = False
        while True:
            try:
                work.wait(STEP)
                if told:
                    self._go_on()
                return
            except RuntimeError:
                if work.is_completed():
                    break
                if not told:
                    self._tell_that_here(group)
                    self._tell_of_wait(group.name, group.members, call)
                    told = True
                self._look_for_departed(group.name, group.exchanges, group.members, call)
                self._look_for_crossed(call)
        try:
            work.wait()  # at once: it failed, or has completed since
        except RuntimeError as error:
            self._explain(group, call, error)

    def leave(self) -> None:
        """Say that this rank makes no collective call any more: others need not wait for it."""
        farewell = Farewell(self.trail.calls, self.trail.last, self.trail.apart, self._exchanges())
        with contextlib.suppress(RuntimeError):  # there is no store any more: so is the run
            self._open_store().set(f"left/{self.rank}", farewell.to_json())

    def _exchanges(self) -> dict[str, int]:
        return {group.name: group.exchanges for group in self._groups.values()}

    def _meet(self, members: tuple[int, ...], call: Call) -> Group:
        """Wait until all members are here, then connect them: that takes milliseconds.

        Waiting here and not in gloo: it can be interrupted, and knows who has not come.
        """
        name = "-".join(str(member) for member in members)
        store = PrefixStore(name, self._open_store())
        mesh = Mesh(self.rank, members)
        store.set(f"address/{self.rank}", mesh.address)
        store.set(f"pid/{self.rank}", str(os.getpid()))
        absent = [member for member in members if member != self.rank]
        began = looked = time.monotonic()
        pause, told = 0.001, False
        while absent := [member for member in absent if not store.check([f"pid/{member}"])]:
            now = time.monotonic()
            if now > began + self._timeout:
                raise WaitedTooLongError(self._waited(call, absent))
            self._look_for_departed(name, 1, absent, call)
            if now > looked + STEP.total_seconds():
                looked = now
                if not told:
                    self._tell_of_wait(name, members, call)
                    told = True
                self._look_for_crossed(call)
            time.sleep(pause)
            pause = min(0.01, 2 * pause)
        if told:
            self._go_on()
        pids = {member: int(store.get(f"pid/{member}")) for member in members}
        group = Group(name, members, pids, store, mesh)
        try:
            mesh.connect(
                {member: store.get(f"address/{member}").decode() for member in members},
                self._timeout,
            )
        except RuntimeError as error:
            self._explain(group, call, error)
        return group

    def _open_store(self) -> Store:
        if self._store is None:
            store = TCPStore(
                self._address, self._port, is_master=False, timeout=timedelta(seconds=30)
            )
            self._store = PrefixStore(self._prefix, store)
        return self._store

    def _look_for_departed(
        self, group: str, exchange: int, absent: Sequence[int], call: Call
    ) -> None:
        """Raise if one of those that are waited for has said that it will not come."""
        left = self._departed(group, exchange, absent)
        if left:
            deadline = time.monotonic() + FAREWELLS
            others = [member for member in absent if member != self.rank]
            while len(left) < len(others) and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._departed(group, exchange, others)
            raise PeerLostError(departed(self.rank, self.trail, call, left))

    def _departed(self, group: str, exchange: int, absent: Sequence[int]) -> dict[int, Farewell]:
        store = self._open_store()
        left = {
            member: Farewell.from_json(store.get(f"left/{member}"))
            for member in absent
            if member != self.rank and store.check([f"left/{member}"])
        }
        return {r: word for r, word in left.items() if word.exchanges.get(group, 0) < exchange}

    def _tell_of_wait(self, group: str, members: Sequence[int], call: Call) -> None:
        described = call.described(self.trail.apart).decode()
        wait = Wait(group, members, {group: 1, **self._exchanges()}, described)
        self._open_store().set(f"wait/{self.rank}", wait.to_json())

    def _go_on(self) -> None:
        self._open_store().set(f"wait/{self.rank}", "")

    def _said(self, rank: int) -> Wait | None:
        store, key = self._open_store(), f"wait/{rank}"
        text = store.get(key) if store.check([key]) else b""
        return Wait.from_json(text) if text else None

    def _look_for_crossed(self, call: Call) -> None:
        """Raise if this rank waits for ranks that wait for each other. Ask when it has told."""
        own = self._said(self.rank)
        waits = crossed(self.rank, own, self._said) if own else {}
        if waits:
            calls = {
                rank: Call.from_description(wait.call.encode()) for rank, wait in waits.items()
            }
            raise CrossedError(disagreement(calls))

    def _tell_that_here(self, group: Group) -> None:
        """For the ranks that come out of a failed exchange earlier than this one."""
        group.store.set(f"here/{self.rank}", str(group.exchanges))

    def _explain(self, group: Group, call: Call, error: RuntimeError) -> NoReturn:
        """Say which rank is missing from an exchange that failed."""
        ended, absent = self._missing(group)
        if ended:
            if self._departed(group.name, group.exchanges, ended):
                self._look_for_departed(group.name, group.exchanges, absent, call)
            raise PeerLostError(
                f"{_ranks(ended)} ended while rank {self.rank} waited in {call}. Either it "
                "failed, and its own error says why, or it makes fewer collective calls than "
                "the others (one batch less?)"
            ) from error
        if absent:
            raise WaitedTooLongError(self._waited(call, absent)) from error
        raise CollectiveError(f"the connection between ranks broke in {call}: {error}") from error

    def _missing(self, group: Group) -> tuple[list[int], list[int]]:
        """The members that ended, and those that live but are not in this exchange."""
        self._tell_that_here(group)
        absent = [member for member in group.members if member != self.rank]
        deadline = time.monotonic() + INQUIRY
        while True:
            # In this order: a rank that was here, too, says so before it ends.
            ended = [member for member in absent if _has_ended(group.pids[member])]
            absent = [member for member in absent if not self._is_here(group, member)]
            ended = [member for member in ended if member in absent]
            if ended or not absent or time.monotonic() > deadline:
                return ended, absent
            time.sleep(0.02)

    @staticmethod
    def _is_here(group: Group, member: int) -> bool:
        key = f"here/{member}"
        return group.store.check([key]) and int(group.store.get(key)) >= group.exchanges

    def _waited(self, call: Call, absent: Sequence[int]) -> str:
        return (
            f"rank {self.rank} waited {self._timeout:.0f} s in {call}, and {_ranks(absent)} did "
            "not come. Every rank must make the same collective calls in the same order"
        )


def _ranks(ranks: Sequence[int]) -> str:
    plural = "s" if len(ranks) > 1 else ""
    return f"rank{plural} {', '.join(str(rank) for rank in ranks)}"


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
