"""A host of a pod, behind an ssh pipe to `tpunb node`; how hosts begin a run and its attempts.

    RemoteNode    one host: its messages, its files, and whether it is still there
    Hosts         all of them: copies the files, connects, compares, and fetches results at the end
    Rendezvous    begins each attempt on all hosts at once, and ends it on all

ssh notices a host that vanishes and ends the pipe. A `tpunb node` that does not answer (SIGSTOP, a
frozen machine) is lost after LOST seconds. Standard library only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Note, Phase
from tpunb.runs.folder_stream import MOST, UnionFolder
from tpunb.runs.protocol import (
    AbandonAttempt,
    Alive,
    AllFinished,
    AttemptFinished,
    AttemptReady,
    BeginRun,
    CollectStacks,
    FileGrown,
    FileReplaced,
    Message,
    MessageReader,
    NodeCommand,
    NodeHere,
    Outbox,
    Pod,
    RankExited,
    RanksForked,
    RankState,
    RankStates,
    RunFinished,
    RunnerEnded,
    ShutDown,
    SignalSent,
    StartAttempt,
    StopRanks,
)
from tpunb.runs.result import Failure
from tpunb.runs.spec import FailureKind, PhaseKind, RunSpec
from tpunb.utils import files, processes, records
from tpunb.worker.supervisor.nodes import Clock, Decision, Node, NodeLost

log = logging.getLogger(__name__)

ALIVE = 2.0
"""Seconds between two signs of life, in both directions."""
LOST = 20.0
"""Seconds without a sign of life after which the other side is lost."""
PATIENCE = 120.0
"""Seconds that a host has for its first message: it imports tpunb, perhaps from a slow disk."""
PAUSED = 1.0
"""If two checks are further apart than this, in seconds, this process itself was stopped."""
MEMORY_STEP = 10_000_000
"""Bytes by which a rank's memory has to change before it is written again."""
_READS = 32
"""The most reads of 64 kB from one host in a step, so that each host has its turn."""
_TAIL = 2000
"""Bytes kept of what ssh prints before it ends."""


class RemoteNode(Node):
    """One host of a run on several hosts."""

    def __init__(
        self, number: int, run: RunDir, spec: RunSpec, order: NodeCommand, clock: Clock
    ) -> None:
        super().__init__(number, spec.ranks_on(number))
        self.name = spec.hosts[number]
        self.here = False
        """It has reported that it can begin."""
        self._dir = run
        self._order = order
        self._clock = clock
        self._union = UnionFolder(run, number, self.ranks, self.name)
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._outbox: Outbox | None = None
        self._reader: MessageReader | None = None
        self._states: tuple[RankState, ...] = ()
        self._memory: dict[int, int] = {}
        """The ranks' memory as last written, in MEMORY_STEPs."""
        self._attempt = 0
        self._stopping = False
        """It was notified to end; otherwise it ends only after its runner."""
        self._retries = spec.retries
        self._heard = self._looked = self._said = clock()

    @property
    def problem(self) -> str:
        """Why this machine's copy of the host's files is incomplete; '' if it is complete."""
        return self._union.problem

    @property
    def descriptor(self) -> int | None:
        """What to wait for; None if nothing comes."""
        return None if self._reader is None else self._reader.fd

    def connect(self) -> None:
        """Start the command that runs `tpunb node` on the host."""
        try:
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
            self._process = subprocess.Popen(
                self._order.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            if self._errors is not None:
                self._errors.close()
            self._lose(f"{self._order.command[0]} cannot be started: {error.strerror}")
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._outbox = Outbox(self._process.stdin.fileno())
        fd = self._process.stdout.fileno()
        os.set_blocking(fd, False)
        self._reader = MessageReader(fd, 2 * MOST)
        self._heard = self._looked = self._clock()
        self._send(self._order.start)

    def _send(self, message: Message) -> None:
        if self._outbox is not None:
            self._outbox.send(message)
            self._said = self._clock()

    def fork_runner(self, replicate: str | None) -> None:
        self._send(BeginRun())

    def decide(self, decision: Decision) -> None:
        self._send(decision)

    def shut_down(self, grace: float, *, of_attempt: bool = False) -> None:
        self._send(ShutDown(grace, of_attempt))
        self._stopping = self._stopping or not of_attempt
        if not self.here:  # nothing has begun there, and the end of its input ends it
            self.ended = self.over = True
            self._disconnect()

    def collect_stacks(self) -> None:
        self._send(CollectStacks())

    def states(self) -> list[RankState]:
        return list(self._states)

    def step(self) -> None:
        if self._reader is None or self._outbox is None:
            return
        now = self._clock()
        if (paused := now - self._looked) > PAUSED:
            self._heard += paused
        self._looked = now
        if now - self._said >= ALIVE:
            self._send(Alive())
        self._outbox.flush()
        for _ in range(_READS):
            messages = self._reader.read()
            for message in messages:
                self._heard = now
                self._take(message)
            if self.over:
                return
            if self._reader.closed:
                self._lose(self._last_words())
                return
            if not messages:
                break
        silent = now - self._heard
        if silent > (LOST if self.here else PATIENCE):
            self._lose(f"no sign of life for {silent:.0f} s")

    def _take(self, message: Message) -> None:
        if not isinstance(message, FileGrown | FileReplaced | RankStates | Alive):
            log.info("%s: %s", self.name, message)
        match message:
            case FileGrown() | FileReplaced():
                for event in self._union.add(message):
                    self.report(event)
            case RankStates(ranks, sent):
                self._set_clock(sent)
                self._states = tuple(each for each in ranks if each.rank in self.ranks)
                self._write_memory()
            case NodeHere(_, sent):
                self._set_clock(sent)
                self.here = True
                self.report(message)
            case RankExited(rank) if rank not in self.ranks:
                pass
            case RanksForked(attempt, pids) if attempt not in range(self._retries + 1) or len(
                pids
            ) != len(self.ranks):
                log.warning("%s: there are no such ranks", self.name)
            case RanksForked(attempt):  # they write into other folders than those before
                self._attempt, self._states = attempt, ()
                self._memory.clear()
                self.report(message)
            case RankExited() | RunnerEnded() | SignalSent():
                self.ended = self.ended or isinstance(message, RunnerEnded)
                self.report(replace(message, time=self._time_here(message.time)))
            case RunFinished() if not self.ended and not self._stopping:
                self._lose("it has ended by itself")
            case RunFinished():
                self.ended = self.over = True
                self._disconnect()
            case _:
                self.report(message)

    def _set_clock(self, sent: float) -> None:
        """Find out how far the host's clock is ahead, from the message that came the fastest.

        What follows from a message then never seems to be older than this message.
        """
        ahead = sent - time.time()
        self._union.ahead = ahead if self._union.ahead is None else max(ahead, self._union.ahead)

    def _time_here(self, sent: float) -> float:
        """The time by this machine's clock. What has been reported is past."""
        return min(max(sent - (self._union.ahead or 0.0), 0.0), time.time())

    def _write_memory(self) -> None:
        for state in self._states:
            steps = state.memory // MEMORY_STEP
            if steps != self._memory.get(state.rank) and self._dir.path.exists():
                self._memory[state.rank] = steps
                with contextlib.suppress(OSError):  # a full disk: the memory is not shown
                    path = self._dir.memory(self._attempt, state.rank)
                    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    files.write_json(path, steps * MEMORY_STEP)

    def _lose(self, reason: str) -> None:
        self.ended = self.over = True
        silent = self._clock() - self._heard
        self._disconnect()
        what = "was lost" if self.here else "could not start"
        self.report(NodeLost(f"{what}: {reason}", time.time() - silent))

    def _last_words(self) -> str:
        """Why the pipe has ended: the last line that ssh or the host has printed."""
        assert self._process is not None and self._errors is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _TAIL))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        said = lines[-1].strip() if lines else "`tpunb node` has ended without a message"
        return f"{said} (exit code {self._process.poll()})"

    def _disconnect(self) -> None:
        """End ssh. On the host, the end of its standard input ends whatever is left."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._reader = self._outbox = None
        with contextlib.suppress(ProcessLookupError):  # gcloud starts an ssh of its own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, self._errors):
            assert stream is not None
            stream.close()

    def close(self) -> None:
        self._disconnect()


class RefusedError(Exception):
    """The run cannot begin on its hosts."""

    def __init__(self, *problems: tuple[str | None, str]) -> None:
        """`problems`: a host, or None for all of them, and what is wrong."""
        super().__init__("; ".join(text for _, text in problems))
        self.failures = [
            Failure.of(FailureKind.REFUSED, text, host=host) for host, text in problems
        ]


class Hosts:
    """The hosts of one run: what comes before it begins, and after it has ended."""

    def __init__(self, run: RunDir, spec: RunSpec, pod: Pod, clock: Clock = time.monotonic) -> None:
        self.nodes = [
            RemoteNode(number, run, spec, order, clock) for number, order in enumerate(pod.nodes)
        ]
        self._dir = run
        self._pod = pod
        self._queues = spec.device == "TPU"
        self._connected = 0
        self._facts: dict[int, Mapping[str, str]] = {}
        self._command: subprocess.Popen[bytes] | None = None
        """The command that is copying files."""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._sent = self._fetched = False

    @property
    def descriptors(self) -> list[int]:
        """What to wait for."""
        return [fd for node in self.nodes if (fd := node.descriptor) is not None]

    def take_facts(self, node: Node, facts: Mapping[str, str]) -> None:
        """Note that a host is here."""
        self._facts[node.number] = facts

    def can_begin(self) -> bool:
        """Advance the start; True once all hosts are here. Raises RefusedError."""
        if not self._sent:
            try:
                if self._command is None:
                    self._start(self._pod.send)
            except OSError as error:
                raise RefusedError((None, f"the files cannot be sent: {error}")) from None
            if (code := self._exit_code()) is None:
                return False
            if code:
                raise RefusedError(*self._problems(code))
            self._sent = True
            self._say_missing()
        # Runs queue for host 0's TPU first: two that begin at once do not wait for each other.
        reached = self.nodes if self._facts or not self._queues else self.nodes[:1]
        for node in reached[self._connected :]:
            node.connect()
        self._connected = max(self._connected, len(reached))
        for node in self.nodes:
            node.step()
        if len(self._facts) < len(self.nodes):
            return False
        names = [node.name for node in self.nodes]
        different = describe_differences(names, [self._facts[n] for n in range(len(names))])
        if different:
            raise RefusedError((None, different))
        return True

    def _say_missing(self) -> None:
        names = ", ".join(node.name for node in self.nodes)
        self._dir.emit(Phase(PhaseKind.STARTING, f"starting, waiting for {names}"))

    def _start(self, command: Sequence[str]) -> None:
        self._command = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def _exit_code(self) -> int | None:
        assert self._command is not None
        code = self._command.poll()
        if code is not None:
            self._command = None
        return code

    def _problems(self, code: int) -> list[tuple[str | None, str]]:
        self._output.seek(0)
        said = self._output.read(1_000_000).decode("utf-8", "replace").strip()
        try:
            found = records.convert(tuple[tuple[str | None, str], ...], records.parse(said))
        except ValueError:
            found = ()
        return list(found) or [(None, said or f"the files were not sent (exit code {code})")]

    def has_fetched(self, *, wanted: bool) -> bool:
        """Fetch large results after the run, if there are any and they are wanted; True at last."""
        if self._fetched or not wanted or not self._pod.fetch:
            return True
        try:
            if self._command is None:
                self._start(self._pod.fetch)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._dir.emit(Note(f"what the run returns cannot be fetched: {error}"))
            return True
        self._fetched = self._exit_code() is not None
        return self._fetched

    def close(self) -> None:
        """End a command that is still running."""
        if self._command is not None:
            below = processes.descendants(self._command.pid)  # ssh for each host
            self._command.kill()
            for process in below:
                processes.send_signal(process, signal.SIGKILL)
            self._command.wait()
        self._output.close()


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


class Rendezvous:
    """The attempts of a run on several hosts, whose torch elastic agents wait for decisions.

    torch's own static rendezvous is not enough: a restart on one host is no restart on the others,
    and a host that is done waits 300 s for one that has vanished (torch 2.9).
    """

    def __init__(self, nodes: Sequence[Node], address: str) -> None:
        """`address`: of host 0, which serves the ranks' store."""
        self._nodes = nodes
        self._address = address
        self._ready: dict[int, int] = {}
        """The latest attempt that each host is ready to begin."""
        self._finished: dict[int, int] = {}
        """The latest attempt that each host has finished."""
        self._port = 0
        self._attempt = -1
        self.all_finished = False

    def take(self, node: Node, message: AttemptReady | AttemptFinished | StopRanks) -> None:
        """Take a message of a host's runner, and decide for all of them."""
        match message:
            case AttemptReady(attempt, port):
                self._ready[node.number] = attempt
                self._port = port if node.number == 0 else self._port
                if all(self._ready.get(each.number) == attempt for each in self._nodes):
                    self._attempt = attempt
                    self._decide(StartAttempt(attempt, self._address, self._port))
            case AttemptFinished(attempt):
                self._finished[node.number] = attempt
                if all(self._finished.get(each.number) == attempt for each in self._nodes):
                    self.all_finished = True
                    self._decide(AllFinished())
            case StopRanks() if self._attempt >= 0:  # once, for the first rank that fails
                self._decide(AbandonAttempt(self._attempt))
                self._attempt = -1

    def _decide(self, decision: Decision) -> None:
        for node in self._nodes:
            node.decide(decision)
