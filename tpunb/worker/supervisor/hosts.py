"""The hosts of one run: the messages that each sends to host 0, and host 0's decisions for all.

The state of one host as host 0 sees it, with the messages that the host sends:

    absent ── HostHere ──> here ── AttemptReady ──> ready ── StartAttempt to all ──> running
                                                      ^                                │ │
                                                      ╰─ AttemptReady (next attempt) ──╯ │
                                                                         AttemptFinished │
                                                                                         v
    any state ── HostEnded ──> ended                                                 finished
    any state ── no heartbeat, connection closed, not here within the patience ──> lost

Host 0's decisions, sent to all hosts:

    all are here         AllHere; if their facts differ, RefuseRun
    all are ready        StartAttempt
    one AttemptFailed    AbandonAttempt, once for each attempt
    all have finished    AllFinished
    one Stop             Stop
    one ended early      Stop
    one is lost          HostLost
    all ended or lost    the run is over: host 0 writes the result and sends RunOver

Host k watches only whether host 0 is alive. Without a heartbeat for too long host 0 counts as lost,
and host k ends its own ranks. So every host ends, whatever the network separates.
Standard library only.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AllHere,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    Beat,
    HostEnded,
    HostHere,
    HostLost,
    JoinHosts,
    Message,
    RefuseRun,
    RunOver,
    StartAttempt,
)
from tpunb.runs.spec import Stop, StopCause
from tpunb.worker.supervisor.links import FAREWELL, Channel, Dialer, Listener

log = logging.getLogger(__name__)

Clock = Callable[[], float]

PAUSED = 1.0
"""If two checks are further apart than this, in seconds, this process itself was stopped."""
REPLACE = 0.25
"""Part of the time after which a host is lost: after this silence the connection is replaced."""


class Hosts(ABC):
    """The hosts of a run, for the supervisor of one of them."""

    def __init__(self, node_rank: int) -> None:
        self.node_rank = node_rank
        self.over = False
        """True once no process of the run is left on any other host that is not lost."""
        self._decided: list[Message] = []

    def hear(self) -> list[Message]:
        """Return the decisions for this host since the last call."""
        decided, self._decided = self._decided, []
        return decided

    @abstractmethod
    def say(self, message: Message) -> None:
        """Send host 0 the state of this host, or a request to stop."""

    @abstractmethod
    def step(self, *, idle: bool) -> None:
        """Read, write and check time limits. `idle`: no rank of this host shows activity."""

    @abstractmethod
    def all_idle(self) -> bool:
        """On host 0: True if every other host has ended or was idle at its last heartbeat."""

    @abstractmethod
    def close(self, result: RunOver | None) -> None:
        """Close the connections.

        With a result, messages that are not sent yet are sent first, and host 0 sends the result.
        """


@dataclass
class _Host:
    """Host 0's record of one host."""

    here: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    heard: float = float("-inf")
    ready: int = -1
    """The latest attempt that the host is ready to begin; -1: none yet."""
    finished: int = -1
    """The latest attempt that the host has finished; -1: none yet."""
    idle: bool = False
    lost: bool = False
    ended: HostEnded | None = None
    """The host's last message; its `now` is how far its clock is ahead of host 0's, in seconds."""

    @property
    def gone(self) -> bool:
        return self.lost or self.ended is not None


class Decisions:
    """Host 0's state machine, without the network: takes messages and sends decisions.

    `send` is called with a node rank (0: host 0's own supervisor) and a message for that host.
    Times are in seconds of `clock`.
    """

    def __init__(
        self,
        names: Sequence[str],
        address: str,
        send: Callable[[int, Message], None],
        *,
        lost_after: float,
        patience: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._names = names
        self._address = address
        self._send = send
        self._lost_after = lost_after
        self._patience = patience
        self._clock = clock
        self.hosts = [_Host() for _ in names]
        self._looked = clock()
        self._deadline: float | None = None
        """Until when all must be here; None until it is host 0's turn on its device."""
        self._begun = False
        self._attempt = -1
        self._port = 0
        self._stopping = False
        self._finished = False

    @property
    def over(self) -> bool:
        """True once every host but host 0 has ended, is lost, or never came."""
        return all(host.gone or not host.here for host in self.hosts[1:])

    def _to_all(self, message: Message) -> None:
        for node, host in enumerate(self.hosts):
            if not host.lost:
                self._send(node, message)

    def hear_of(self, node: int) -> None:
        """Note that something was received from a host, if only a heartbeat."""
        self.hosts[node].heard = self._clock()

    def take(self, node: int, message: Message) -> None:
        host = self.hosts[node]
        self.hear_of(node)
        if host.lost:
            return
        match message:
            case Beat(idle):
                host.idle = idle
            case HostHere(facts):
                host.here, host.facts = True, facts
                if node == 0:
                    self._deadline = self._clock() + self._patience
                self._begin_if_all_here()
            case AttemptReady(attempt, port):
                host.ready = attempt
                if node == 0:
                    self._port = port
                self._start_if_all_ready(attempt)
            case AttemptFinished(attempt):
                host.finished = attempt
                if all(other.finished == attempt for other in self.hosts):
                    self._finished = True
                    self._to_all(AllFinished())
            case AttemptFailed(attempt, reason):
                # An attempt is abandoned once, for the first rank that fails.
                if attempt == self._attempt and not self._stopping:
                    self._attempt = -1
                    self._to_all(AbandonAttempt(attempt, reason))
            case Stop(now=now):
                if now or not self._stopping:
                    self._stopping = True
                    self._to_all(message)
            case HostEnded():
                # The host's clock may be ahead of this one; failures must stay in order.
                host.ended = replace(message, now=message.now - time.time())
                if not self._stopping and not self._finished and len(self.hosts) > 1:
                    self._stopping = True
                    reason = f"{self._names[node]} has ended before the others"
                    self._to_all(Stop(StopCause.PEER_FAILED, reason))
            case _:
                log.warning("not for host 0: %s", message)

    def _begin_if_all_here(self) -> None:
        if self._begun or not all(host.here for host in self.hosts):
            return
        self._begun = True
        if different := describe_differences(self._names, [host.facts for host in self.hosts]):
            self._stopping = True
            self._to_all(RefuseRun(different))
        else:
            self._to_all(AllHere())

    def _start_if_all_ready(self, attempt: int) -> None:
        if self._stopping or any(host.ready != attempt for host in self.hosts):
            return
        self._attempt = attempt
        self._to_all(StartAttempt(attempt, self._address, self._port))

    def lose(self, node: int, why: str) -> None:
        """Note that a host is gone, and have all others end."""
        host = self.hosts[node]
        if host.gone:
            return
        host.lost, self._stopping = True, True
        # The time of its last sign of life: errors of its ranks' peers come later.
        silent = self._clock() - host.heard if host.here else 0.0
        self._to_all(HostLost(node, f"host {self._names[node]} {why}", time.time() - silent))

    def look(self) -> None:
        """Check for hosts that are silent, and for hosts that have not come in time."""
        now = self._clock()
        if (paused := now - self._looked) > PAUSED:
            for host in self.hosts:
                host.heard += paused
            if self._deadline is not None:
                self._deadline += paused
        self._looked = now
        for node, host in enumerate(self.hosts[1:], 1):
            if host.gone:
                continue
            silent = now - host.heard > self._lost_after
            if host.here and silent:
                self.lose(node, f"was lost: no heartbeat for {self._lost_after:g} s")
            # A connected host that is not here yet waits for its turn on a device.
            elif silent and self._deadline is not None and now > self._deadline:
                self.lose(node, f"has not connected within {self._patience:g} s")

    def all_idle(self) -> bool:
        """True if every other host is idle or has ended."""
        return all(host.idle or host.ended for host in self.hosts[1:])


def describe_differences(names: Sequence[str], facts: Sequence[Mapping[str, str]]) -> str:
    """The facts in which hosts differ: 'torch: 2.9.0 on h0, h1, but 2.8.0 on h2'; '' if none."""
    lines = []
    for fact in dict.fromkeys(fact for one in facts for fact in one):
        groups: dict[str, list[str]] = {}
        for name, one in zip(names, facts, strict=True):
            groups.setdefault(one.get(fact, ""), []).append(name)
        usual, *others = sorted(groups.items(), key=lambda group: -len(group[1]))
        if others:
            rest = ", ".join(f"{value or 'none'} on {', '.join(on)}" for value, on in others)
            lines.append(f"{fact}: {usual[0] or 'none'} on {', '.join(usual[1])}, but {rest}")
    return "; ".join(lines)


class Leader(Hosts):
    """The hosts as the supervisor of host 0 sees them: it listens for the others and decides."""

    def __init__(
        self, run: str, names: Sequence[str], join: JoinHosts, clock: Clock = time.monotonic
    ) -> None:
        """Listen. Raises OSError if the port is taken, or the address is not this host's."""
        super().__init__(0)
        self._clock = clock
        self._beat = join.beat
        self._beaten = float("-inf")
        nodes = range(1, len(names))
        key = bytes.fromhex(join.key)
        self._listener = Listener(run, key, join.address, join.port, nodes, clock)
        self._channels = {node: Channel() for node in nodes}
        self.decisions = Decisions(
            names,
            join.address,
            self._send,
            lost_after=join.lost_after,
            patience=join.patience,
            clock=clock,
        )
        self.over = self.decisions.over

    @property
    def port(self) -> int:
        return self._listener.port

    def _send(self, node: int, message: Message) -> None:
        if node == 0:
            self._decided.append(message)
        else:
            self._channels[node].send(message)

    def say(self, message: Message) -> None:
        self.decisions.take(0, message)

    def step(self, *, idle: bool) -> None:
        for node, connection, have, nonce in self._listener.accept():
            if self.decisions.hosts[node].lost:
                connection.close()
                continue
            channel = self._channels[node]
            self._listener.welcome(connection, nonce, channel.have)
            log.info("host %d is connected%s", node, " again" if channel.connection else "")
            channel.attach(connection, have)
            self._beaten = float("-inf")
            self.decisions.hear_of(node)
        for node, channel in self._channels.items():
            for message in channel.read():
                if not isinstance(message, Beat):
                    log.info("host %d: %s", node, message)
                self.decisions.take(node, message)
            if channel.ended:
                self.decisions.lose(node, "was lost: its supervisor has ended")
                channel.close()  # a host that sends its last messages waits for this
        self.decisions.look()
        if (now := self._clock()) - self._beaten >= self._beat:
            self._beaten = now
            for channel in self._channels.values():
                channel.beat(Beat())
        self.over = self.decisions.over

    def all_idle(self) -> bool:
        return self.decisions.all_idle()

    def results(self) -> list[HostEnded]:
        """The last messages of the other hosts that have sent one."""
        return [host.ended for host in self.decisions.hosts[1:] if host.ended is not None]

    def close(self, result: RunOver | None) -> None:
        self._listener.close()
        deadline = None if result is None else time.monotonic() + FAREWELL
        told = {
            node: channel
            for node, channel in self._channels.items()
            if not self.decisions.hosts[node].lost
        }
        if result is not None:
            for channel in told.values():
                channel.send(result)
        for node, channel in self._channels.items():
            channel.close(deadline=deadline if node in told else None)


class Member(Hosts):
    """The hosts as the supervisor of any other host sees them: it connects to host 0 only."""

    def __init__(
        self, run: str, names: Sequence[str], join: JoinHosts, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(join.node_rank)
        self._leader = names[0]
        self._where = f"{join.leader}:{join.port}"
        self._clock = clock
        self._join = join
        self._dialer = Dialer(
            run,
            bytes.fromhex(join.key),
            join.node_rank,
            join.address,
            (join.leader, join.port),
            clock,
        )
        self._channel = Channel()
        self._heard = self._looked = clock()
        self._beaten = float("-inf")
        self._dialling = True
        self._replacing = False
        """Host 0 has got a proof, and may have closed the current connection for the new one."""

    def say(self, message: Message) -> None:
        if isinstance(message, HostEnded) and self._channel.connection is None:
            self.over = True  # host 0 does not know of this host
        self._channel.send(message)

    def step(self, *, idle: bool) -> None:
        if self.over:
            return
        now = self._clock()
        if (paused := now - self._looked) > PAUSED:
            self._heard += paused
        self._looked = now
        self._connect(now)
        for message in self._channel.read():
            self._heard = now
            if isinstance(message, Beat):
                continue
            log.info("host 0: %s", message)
            self._decided.append(message)
            self.over = self.over or isinstance(message, RunOver)
        # Host 0 closes a connection that is being replaced.
        if self._channel.ended and not self._dialling and not self.over:
            self._lose("was lost: its supervisor has ended")
        elif now - self._heard > self._limit and not self.over:
            self._lose(
                f"was lost: no heartbeat for {self._join.lost_after:g} s"
                if self._channel.connection
                else f"could not be reached at {self._where} within {self._join.patience:g} s"
                f" ({self._dialer.problem or 'no answer'})"
            )
        if now - self._beaten >= self._join.beat:
            self._beaten = now
            self._channel.beat(Beat(idle))

    @property
    def _limit(self) -> float:
        return self._join.lost_after if self._channel.connection else self._join.patience

    def _connect(self, now: float) -> None:
        """Connect; replace the connection if nothing is received over it."""
        quiet = REPLACE * self._join.lost_after
        heard = self._channel.connection is not None and now - self._heard < quiet
        if heard and not self._replacing:
            if self._dialling:
                self._dialer.close()
            self._dialling = False
            return
        if not self._dialling:
            log.warning("nothing was received from host 0: opening another connection")
            self._dialling = True
        made = self._dialer.step(self._channel.have, quiet)
        self._replacing = self._replacing or self._dialer.proving
        if made is not None:
            log.info("connected to host 0")
            self._channel.attach(*made)
            self._heard, self._dialling, self._replacing = now, False, False
            self._beaten = float("-inf")  # a heartbeat shows host 0 at once that this one is used

    def _lose(self, why: str) -> None:
        self.over = True
        silent = self._clock() - self._heard if self._channel.connection else 0.0
        self._decided.append(HostLost(0, f"host {self._leader} {why}", time.time() - silent))

    def all_idle(self) -> bool:
        return False  # host 0 decides

    def close(self, result: RunOver | None) -> None:
        self._dialer.close()
        waits = result is not None and not self.over  # host 0 may not have received the stop yet
        self._channel.close(deadline=time.monotonic() + FAREWELL if waits else None)


def join_hosts(run: str, names: Sequence[str], join: JoinHosts) -> Hosts:
    """Join a run on several hosts. Raises OSError if host 0 cannot listen."""
    return Leader(run, names, join) if join.node_rank == 0 else Member(run, names, join)
