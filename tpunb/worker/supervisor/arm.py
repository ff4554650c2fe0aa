"""A run's part on one host, for the supervision of the run at the other end of an ssh pipe.

    supervision ── ssh: orders ──> Arm ──> LocalNode: fork server, runner, ranks of this host
                <── messages, files ──

It decides nothing. If the pipe ends, or its other end is silent for too long, it stops the ranks
with their grace period. Standard library only.
"""

from __future__ import annotations

import base64
import logging
import time

from tpunb.runs import events
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note
from tpunb.runs.folder_stream import FolderStream
from tpunb.runs.protocol import (
    AbandonAttempt,
    Alive,
    AllFinished,
    BeginRun,
    CollectStacks,
    FileGrown,
    Message,
    NodeHere,
    Outbox,
    RankStates,
    ShutDown,
    StacksCollected,
    StartAttempt,
    StartNode,
)
from tpunb.runs.spec import Stop
from tpunb.worker.supervisor.nodes import Clock, LocalNode
from tpunb.worker.supervisor.remote_node import ALIVE, PAUSED

log = logging.getLogger(__name__)

MOST_WAITING = 4_000_000
"""Bytes that may wait to be sent before no more files are read: the pipe is slow."""
GONE = 30.0
"""Seconds without a sign of life after which the supervision counts as gone: a connection that is
cut does not close at this end."""
FAREWELL = 60.0
"""Seconds for the last messages."""
LAST_FILES = 15.0
"""Seconds, before them, for the last files of a run that was stopped."""


class Arm:
    """Carries out the orders for this host, and sends what happens on it."""

    def __init__(
        self,
        run: RunDir,
        order: StartNode,
        node: LocalNode,
        outbox: Outbox,
        clock: Clock = time.monotonic,
    ) -> None:
        self._dir = run
        self.spec = run.read_spec()
        self.node = node
        self._outbox = outbox
        self._clock = clock
        self._stream = FolderStream(run)
        self._may_fork = self._ordered = False
        self._heard = self._looked = clock()
        self._said = float("-inf")
        self._stopping = False
        self._over: float | None = None
        """When everything was over here."""
        self._last: float | None = None
        """When the last file was read."""
        node.report = self._report  # type: ignore[assignment]  # it reports nothing else
        outbox.send(NodeHere(order.facts, time.time()))

    def _report(self, message: Message) -> None:
        if isinstance(message, StacksCollected):  # they come before this message
            self._send_files()
        self._outbox.send(message)

    def begin(self) -> None:
        """The fork server is ready."""
        self._may_fork = True
        self._fork()

    def _fork(self) -> None:
        if self._may_fork and self._ordered:
            self.node.fork_runner(self.spec.replicate)

    def on_order(self, message: Message) -> None:
        """Carry out an order."""
        self._heard = self._clock()
        match message:
            case BeginRun():
                self._ordered = True
                self._fork()
            case StartAttempt() | AbandonAttempt() | AllFinished():
                self.node.decide(message)
            case ShutDown(grace, of_attempt):
                self._stopping = self._stopping or not of_attempt
                self.node.shut_down(grace, of_attempt=of_attempt)
            case CollectStacks():
                self.node.collect_stacks()
            case Alive():
                pass
            case _:
                log.warning("not for a node: %s", message)

    def stop(self, stop: Stop) -> None:
        """Stop the ranks, because the pipe has ended or this machine shuts down."""
        self.node.shut_down(0.0 if stop.now else self.spec.grace)

    def step(self) -> bool:
        """Advance; True once no process is left and everything was sent."""
        self.node.step()
        now = self._clock()
        if (paused := now - self._looked) > PAUSED:
            self._heard += paused
        self._looked = now
        if now - self._heard > GONE:
            log.warning("no sign of life from the run's supervisor for %d s", GONE)
            self._heard = float("inf")
            self.node.shut_down(self.spec.grace)
        if now - self._said >= ALIVE:
            self._said = now
            self._outbox.send(RankStates(tuple(self.node.states()), time.time()))
        self._send_files()
        self._outbox.flush()
        if self._last is None:
            return False
        late = now - self._last > FAREWELL
        return self._outbox.closed or late or not self._outbox.size

    def _send_files(self) -> None:
        if self._last is not None or self._outbox.size > MOST_WAITING:
            return
        now = self._clock()
        over = self.node.over  # checked before the files are read, so the last lines are read too
        if over and self._over is None:
            self._over = now
        late = self._stopping and self._over is not None and now - self._over > LAST_FILES
        for change in () if late else self._stream.read(last=over):
            self._outbox.send(change)
            if self._outbox.size > MOST_WAITING:
                return
        if late:  # who stops a run does not wait for gigabytes of its output
            self._outbox.send(self._incomplete())
        if over:
            self._last = now
            self._stream.close()

    def _incomplete(self) -> FileGrown:
        note = Note(f"output is left out here; all of it is in {self._dir.path}", time.time())
        data = base64.b64encode(f"\n{events.to_line(note)}".encode()).decode()
        return FileGrown(self._dir.events.name, data)

    def close(self) -> None:
        self.node.close()
