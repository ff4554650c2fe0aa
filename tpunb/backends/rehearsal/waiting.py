"""Waits for the other ranks, and finds out why they do not take part.

A rank that waits for more than a moment publishes that in the run's store, where the others read
it. The store is not used while the ranks are in time. One wait:

    call ─ exchange ─ all took part ─────────────────────────── return
              │
              ├─ `step` has passed: publish a Wait, then check
              │     ├─ a member left a Departure ────────────── PeerLostError
              │     ├─ waiting ranks wait for each other ────── DeadlockError
              │     └─ neither: wait for another `step`
              └─ it failed (time-out, broken connection): find out who is in it
                    ├─ a member's process has ended ─────────── PeerLostError
                    ├─ a member lives and is elsewhere ──────── WaitedTooLongError
                    └─ all are in it ────────────────────────── ExchangeFailedError
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store, Work

from tpunb.backends.rehearsal.agent import Agent
from tpunb.backends.rehearsal.call import (
    CodeLine,
    RankCall,
    describe_first_divergence,
    describe_mismatch,
    elsewhere,
)
from tpunb.backends.rehearsal.errors import (
    DeadlockError,
    ExchangeFailedError,
    PeerLostError,
    WaitedTooLongError,
)
from tpunb.backends.rehearsal.mesh import Arrival, Group, Mesh
from tpunb.utils import descriptors
from tpunb.utils.text import describe_ranks


@dataclass(frozen=True)
class WaitTimes:
    """Seconds that waiting ranks spend on finding out why others do not take part."""

    step: float = 0.2
    """How long a wait stays in C++, where KeyboardInterrupt cannot reach it."""
    departures: float = 1.0
    """How long to wait, after one rank has left the train cell, for others that leave with it."""
    inquiry: float = 2.0
    """How long the ranks of a failed collective have to publish that they are in it."""


_P = TypeVar("_P", bound="_Published")


class _Published:
    """Facts that a rank publishes for the others, as JSON."""

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls: type[_P], text: str | bytes) -> _P:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Departure(_Published):
    """Published by a rank that will make no more collective calls."""

    calls: int
    last: str
    """The line of its last collective; '' if it took part in none."""
    first_divergence: str
    exchanges: Mapping[str, int]
    """The number of exchanges that it took part in, by group of ranks."""
    compared: str
    """`Comparison.described` of the rank."""


@dataclass(frozen=True)
class Wait(_Published):
    """Published by a rank that waits."""

    group: str
    members: Sequence[int]
    """The ranks of the group."""
    exchanges: Mapping[str, int]
    """The number of exchanges that it began, by group, including the one in which it waits."""
    call: str
    """The call, as `RankCall.described`."""

    def lacks(self, other: Wait) -> bool:
        """True if this rank waits for the one that published `other`."""
        return other.exchanges.get(self.group, 0) < self.exchanges[self.group]


class CallHistory:
    """The lines at which one rank made its collectives, as far as error messages need them."""

    def __init__(self) -> None:
        self.calls = 0
        self.last_line: CodeLine | None = None
        self.first_divergence = ""
        """The first collective that the ranks called from different lines: 'collective 4, at
        cell [1], line 6: …'; '' if there was none."""
        self.swapped: tuple[int, int] | None = None
        """Two ranks that called this collective and the one before in a different order."""
        self.line_before: CodeLine | None = None
        self._before: Mapping[int, int] = {}

    def add(self, line: CodeLine | None, line_hashes: Mapping[int, int]) -> None:
        """Add a collective that ranks agreed on, with the hashes of their lines."""
        self.calls += 1
        self.line_before, self.last_line = self.last_line, line
        lines = set(line_hashes.values())
        self.swapped = None
        if len(lines) > 1 and line_hashes.keys() == self._before.keys():
            first, *others = sorted(line_hashes)
            order = self._before[first], line_hashes[first]
            for other in others:
                if (line_hashes[other], self._before[other]) == order and len(set(order)) > 1:
                    self.swapped = self.swapped or (first, other)
        self._before = line_hashes
        if not self.first_divergence and len(lines) > 1:
            self.first_divergence = f"collective {self.calls}, at {line}"

    @property
    def last(self) -> str:
        """The line of the last collective."""
        return str(self.last_line or "")


def find_cycle(rank: int, wait: Wait, find_wait: Callable[[int], Wait | None]) -> dict[int, Wait]:
    """The waits that this rank depends on, if some of them form a cycle; otherwise {}.

    Ranks of one group compare their calls before each exchange. But if ranks name different
    groups (pairs of xm.collective_permute that are not the same on all ranks), each may wait in a
    group of its own for a rank that waits in another.

    `find_wait` returns the wait that a rank has published, or None. It may read one rank after the
    other: in a cycle, no wait can end before the wait of the rank that it is for.
    """
    waits: dict[int, Wait | None] = {rank: wait}
    needs: dict[int, list[int]] = {}
    pending = [rank]
    while pending:
        waiting = pending.pop()
        own, needs[waiting] = waits[waiting], []
        assert own is not None
        for member in own.members:
            if member not in waits:
                waits[member] = find_wait(member)
            other = waits[member]
            if other is not None and own.lacks(other):
                needs[waiting].append(member)
                if member not in needs and member not in pending:
                    pending.append(member)
    if not _has_cycle(needs):
        return {}
    return {each: other for each in sorted(needs) if (other := waits[each]) is not None}


def _has_cycle(needs: Mapping[int, Sequence[int]]) -> bool:
    """True if some ranks remain after repeatedly removing the ranks that need no other."""
    left = dict(needs)
    while free := [rank for rank, others in left.items() if not left.keys() & set(others)]:
        for rank in free:
            del left[rank]
    return bool(left)


class Connections:
    """One rank's connections to the others, and its waits for them.

    Nothing is connected before the first collective.
    """

    def __init__(self, agent: Agent, timeout: float, times: WaitTimes | None = None) -> None:
        self.rank = agent.rank
        self.history = CallHistory()
        self._agent = agent
        self._timeout = self._longest = timeout
        self._times = times or WaitTimes()
        self._groups: dict[tuple[int, ...], Group] = {}
        self._store: Store | None = None
        self._leaving = "left"
        """Key under which ranks that will not come have published it: 'left', or 'gone' once this
        rank has left the train cell itself."""

    @contextlib.contextmanager
    def limited(self, timeout: float | None) -> Iterator[None]:
        """A block in which waits take at most `timeout` seconds; None: as ever."""
        before = self._timeout
        self._timeout = before if timeout is None else timeout
        try:
            yield
        finally:
            self._timeout = before

    def group(self, members: Sequence[int], call: RankCall) -> Group:
        """The group of these ranks, connected. Waits for all of them the first time."""
        key = tuple(members)
        if key not in self._groups:
            with descriptors.opening_own():
                self._groups[key] = self._connect(key, call)
        return self._groups[key]

    def gloo(self, members: Sequence[int], call: RankCall) -> tuple[Any, Group]:
        """The group and its gloo backend, once all members have agreed on a call."""
        group = self.group(members, call)
        if group.backend is None:
            try:
                with descriptors.opening_own():
                    group.connect_gloo(self.rank, self._timeout)
            except RuntimeError as error:
                self._raise_cause(group, call, error)
        return group.backend, group

    def exchange_headers(
        self, header: bytes, payload: torch.Tensor | None, members: Sequence[int], call: RankCall
    ) -> Mesh:
        """Send all members a header, and the payload if there is room; receive theirs."""
        group = self.group(members, call)
        self.wait(group.mesh.send(header, payload, self._timeout), group, call)
        return group.mesh

    def wait(self, work: Work | Arrival, group: Group, call: RankCall) -> None:
        """Wait for the end of an exchange. Can be interrupted."""
        group.exchanges += 1
        step = timedelta(seconds=self._times.step)
        published = False
        while True:
            step_began = time.monotonic()
            try:
                work.wait(step)
                if published:
                    self._withdraw_wait()
                return
            except RuntimeError:
                # gloo's work of a reduce_scatter is never completed, also if it has failed.
                early = time.monotonic() - step_began < self._times.step / 2
                if early or work.is_completed():
                    break
            # Not within `except`: the time-out of one step does not cause the errors raised below.
            if not published:
                self._publish_arrival(group)
                self._publish_wait(group.name, group.members, call)
                published = True
            self._check_departures(group.name, group.exchanges, group.members, call)
            self._check_deadlock()
        try:
            work.wait()  # returns at once: it failed, or has completed since
        except RuntimeError as error:
            self._raise_cause(group, call, error)

    def leave(self, compared: str, *, final: bool) -> dict[int, str]:
        """Publish that this rank has left the train cell, so that no rank in the cell waits for it.

        Afterwards (in exit handlers) it waits for all ranks that have not published `final`, the
        end of their process. With `final`, return what the connected ranks published that have
        published it before.
        """
        history = self.history
        departure = Departure(
            history.calls, history.last, history.first_divergence, self._exchanges(), compared
        )
        known = {member for group in self._groups for member in group} - {self.rank}
        with contextlib.suppress(RuntimeError):  # the store is gone: the run is over as well
            store = self._open_store()
            store.set(f"left/{self.rank}", departure.to_json())
            self._leaving = "gone"
            if final:
                store.set(f"gone/{self.rank}", departure.to_json())
                return {
                    rank: Departure.from_json(store.get(f"gone/{rank}")).compared
                    for rank in known
                    if store.check([f"gone/{rank}"])
                }
        return {}

    def departed(self, ranks: Sequence[int]) -> list[int]:
        """The ranks among these that have published that they have left the train cell."""
        store = self._open_store()
        return [rank for rank in ranks if rank != self.rank and store.check([f"left/{rank}"])]

    def _exchanges(self) -> dict[str, int]:
        return {group.name: group.exchanges for group in self._groups.values()}

    def _connect(self, members: tuple[int, ...], call: RankCall) -> Group:
        """Wait until all members are here, then connect them, which takes milliseconds.

        This wait, unlike gloo's own, can be interrupted, and knows which ranks are missing.
        """
        name = "-".join(str(member) for member in members)
        store = PrefixStore(name, self._open_store())
        mesh = Mesh(self.rank, members)
        store.set(f"address/{self.rank}", mesh.address)
        store.set(f"pid/{self.rank}", str(os.getpid()))
        absent = [member for member in members if member != self.rank]
        began = checked = time.monotonic()
        pause, published = 0.001, False
        while absent := [member for member in absent if not store.check([f"pid/{member}"])]:
            now = time.monotonic()
            if now > began + self._timeout:
                raise WaitedTooLongError(self._timed_out(call, absent))
            self._check_departures(name, 1, absent, call)
            if now > checked + self._times.step:
                checked = now
                if not published:
                    self._publish_wait(name, members, call)
                    published = True
                self._check_deadlock()
            time.sleep(pause)
            pause = min(0.01, 2 * pause)
        if published:
            self._withdraw_wait()
        pids = {member: int(store.get(f"pid/{member}")) for member in members}
        addresses = {member: store.get(f"address/{member}").decode() for member in members}
        group = Group(name, members, pids, store, mesh)
        try:
            mesh.connect(addresses, pids, self._timeout)
        except RuntimeError as error:
            self._raise_cause(group, call, error)
        return group

    def _open_store(self) -> Store:
        if self._store is None:
            store = self._agent.open_store(timedelta(seconds=30))
            self._store = PrefixStore(f"tpunb/backends/rehearsal/{self._agent.attempt}", store)
        return self._store

    # -- ranks that will not come

    def _check_departures(
        self, group: str, exchange: int, absent: Sequence[int], call: RankCall
    ) -> None:
        """Raise PeerLostError if a rank that this one waits for has published its departure."""
        left = self._departures(group, exchange, absent)
        if left:
            deadline = time.monotonic() + self._times.departures
            others = [member for member in absent if member != self.rank]
            while len(left) < len(others) and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._departures(group, exchange, others)
            raise PeerLostError(describe_departures(self.rank, self.history, call, left))

    def _departures(self, group: str, exchange: int, absent: Sequence[int]) -> dict[int, Departure]:
        store = self._open_store()
        left = {
            member: Departure.from_json(store.get(f"{self._leaving}/{member}"))
            for member in absent
            if member != self.rank and store.check([f"{self._leaving}/{member}"])
        }
        return {
            member: departure
            for member, departure in left.items()
            if departure.exchanges.get(group, 0) < exchange
        }

    # -- ranks that wait for each other

    def _publish_wait(self, group: str, members: Sequence[int], call: RankCall) -> None:
        described = call.described(self.history.first_divergence).decode()
        wait = Wait(group, members, {group: 1, **self._exchanges()}, described)
        self._open_store().set(f"wait/{self.rank}", wait.to_json())

    def _withdraw_wait(self) -> None:
        self._open_store().set(f"wait/{self.rank}", "")

    def _find_wait(self, rank: int) -> Wait | None:
        store, key = self._open_store(), f"wait/{rank}"
        text = store.get(key) if store.check([key]) else b""
        return Wait.from_json(text) if text else None

    def _check_deadlock(self) -> None:
        """Raise DeadlockError if this rank's published wait can never end."""
        own = self._find_wait(self.rank)
        waits = find_cycle(self.rank, own, self._find_wait) if own else {}
        if waits:
            raise DeadlockError(
                describe_mismatch(
                    {
                        rank: RankCall.from_description(wait.call.encode())
                        for rank, wait in waits.items()
                    }
                )
            )

    # -- exchanges that failed

    def _publish_arrival(self, group: Group) -> None:
        """Publish that this rank is in an exchange, for ranks in which it fails earlier."""
        group.store.set(f"here/{self.rank}", str(group.exchanges))

    def _raise_cause(self, group: Group, call: RankCall, error: RuntimeError) -> NoReturn:
        """Raise an error that names the rank that is missing from a failed exchange."""
        ended, absent = self._missing(group)
        own = describe_ranks([self.rank])
        # Whether the end of its process or only a closed connection was seen: a rank that returned
        # from the train cell is the cause.
        if self._departures(group.name, group.exchanges, ended or absent):
            self._check_departures(group.name, group.exchanges, absent, call)
        if ended:
            raise PeerLostError(
                f"{describe_ranks(ended)} ended while {own} waited in {call}. Either a rank "
                "failed, and its own error shows the cause, or it makes fewer collective calls "
                "than the others (one batch less?)"
            ) from error
        if absent:
            raise WaitedTooLongError(self._timed_out(call, absent)) from error
        raise ExchangeFailedError(
            f"the connection between ranks broke in {call}: {error}"
        ) from error

    def _missing(self, group: Group) -> tuple[list[int], list[int]]:
        """The members that have ended, and those not in this exchange, which include them."""
        self._publish_arrival(group)
        absent = [member for member in group.members if member != self.rank]
        deadline = time.monotonic() + self._times.inquiry
        while True:
            # In this order: a rank that was in the exchange publishes that before it ends.
            ended = [member for member in absent if _has_ended(group.pids[member])]
            absent = [member for member in absent if not self._has_arrived(group, member)]
            ended = [member for member in ended if member in absent]
            if ended or not absent or time.monotonic() > deadline:
                return ended, absent
            time.sleep(0.02)

    @staticmethod
    def _has_arrived(group: Group, member: int) -> bool:
        key = f"here/{member}"
        return group.store.check([key]) and int(group.store.get(key)) >= group.exchanges

    def _timed_out(self, call: RankCall, absent: Sequence[int]) -> str:
        return (
            f"{describe_ranks([self.rank])} waited {self._timeout:.0f} s in {call}, but "
            f"{describe_ranks(absent)} did not take part. Every rank must make the same "
            "collective calls in the same order"
        )


def describe_departures(
    rank: int, history: CallHistory, call: RankCall, left: Mapping[int, Departure]
) -> str:
    """The error message of a rank that waits for others that have left the train cell."""
    names, own = describe_ranks(left), describe_ranks([rank])
    have = "have" if len(left) > 1 else "has"
    first = left[min(left)]
    last = f", the last at {first.last}" if first.last else ""
    divergences = {
        rank: history.first_divergence,
        **{member: departure.first_divergence for member, departure in left.items()},
    }
    lines = [
        f"{names} {have} returned from the train cell while {own} waited in {call}: this is "
        f"the {_ordinal(history.calls + 1)} collective of {own}, but {names} took part in "
        f"{first.calls or 'none'}{last}.",
        "Every rank must make the same collective calls. Does one rank have fewer batches, leave "
        f"its loop early, or skip a call under a condition on the rank? {elsewhere()} this would "
        "hang.",
        *describe_first_divergence(divergences),
    ]
    return "\n".join(lines)


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0)
    return f"{number}{ending or 'th'}"


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"
