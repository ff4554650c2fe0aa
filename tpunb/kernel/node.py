"""`tpunb node`: runs the supervisor on one host of a run on several hosts.

    starter (mirror, ssh) ── stdin, the lifeline ──> this process ── pipes ──> supervisor
                          <── stdout, the stream ──

This process has the role of the kernel on one machine: it passes the run folder and stops to the
supervisor, and sends the contents of the run folder. It reads the folder like any other follower,
so a slow or broken connection delays nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from tpunb.backends.choice import require_one_host
from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.machine import environment
from tpunb.machine.machine import Machine, detect_machine
from tpunb.machine.metadata import PATIENCE
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.folder_stream import FolderStream
from tpunb.runs.protocol import JoinHosts
from tpunb.runs.spec import RunSpec, Stop, StopCause
from tpunb.runs.stream import End, Hello, Line, Start, decode, encode
from tpunb.utils import records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineBuffer
from tpunb.utils.version import installed_versions

POLL_INTERVAL = 0.04
"""Seconds between polls of the run folder."""
REFUSED = 2
"""Exit status if nothing was started."""


@dataclass(frozen=True)
class NodeOrder:
    """The options of `tpunb node`, and its standard streams."""

    run: Path
    node_rank: int = 0
    address: str = ""
    leader: str = ""
    port: int = 0
    detach: bool = False
    stdin: Input = field(default_factory=lambda: Input(0))
    stdout: IO[bytes] = field(default_factory=lambda: sys.stdout.buffer)


class Input:
    """Lines of a file descriptor; unlike a file object, a thread may block in it at exit."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = LineBuffer()
        self._lines: list[bytes] = []

    def line(self, patience: float = 0.0) -> bytes:
        """Return the next line without its newline; b'' at the end, or after `patience` seconds."""
        while not self._lines:
            if patience and not select.select([self._fd], [], [], patience)[0]:
                return b""
            data = os.read(self._fd, 1 << 16)
            if not data:
                rest = bytes(self._buffer.rest)
                self._buffer.rest.clear()
                return rest
            self._lines += self._buffer.feed(data)
        return self._lines.pop(0)


class NodeOutput:
    """Standard output; once its reader is gone, writes are ignored."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.closed = False

    def send(self, line: Line) -> None:
        if not self.closed:
            try:
                self._file.write(encode(line))
                self._file.flush()
            except OSError:
                self.closed = True


def run_node(order: NodeOrder) -> int:
    """Run this host's part and return its exit status; an error is the last line of the stream."""
    output = NodeOutput(order.stdout)
    try:
        return Node(order, output).run()
    except TpunbError as error:
        output.send(End(REFUSED, str(error)))
        return REFUSED


def follow_node(order: NodeOrder) -> int:
    """Send the contents of a run folder, until the run has ended or its follower is gone.

    The first line of standard input is a JSON object with the number of known bytes of each file.
    """
    run, output = RunDir(order.run), NodeOutput(order.stdout)
    try:
        known = records.convert(Mapping[str, int], records.parse(order.stdin.line()))
    except (OSError, ValueError) as error:
        raise TpunbError(f"standard input does not say what is known: {error}") from None
    left = threading.Event()

    def request(stop: Stop | None) -> None:
        if stop is not None:
            state.request_stop(run, stop)
        else:  # standard input has closed: the follower is gone
            left.set()

    def follower_is_gone() -> bool:
        return output.closed or left.is_set()

    def over() -> bool:
        return follower_is_gone() or not state.run_state(run).active

    threading.Thread(target=_pass_on_stops, args=[order.stdin, request], daemon=True).start()
    state.read_spec(run)  # raises TpunbError if this is not a run folder
    _send_folder(run, known, output, over)
    return 0 if follower_is_gone() else _end(run, output)


def _send_folder(
    run: RunDir, since: Mapping[str, int], output: NodeOutput, over: Callable[[], bool]
) -> None:
    """Send everything that is in the run folder, until `over()`."""
    stream = FolderStream(run, since)
    while True:
        last = over()  # checked before the files are read, so that the last lines are read too
        for said in stream.read(last=last):
            output.send(said)
        if last:
            stream.close()
            return
        time.sleep(POLL_INTERVAL)


def _end(run: RunDir, output: NodeOutput, broken: str = "") -> int:
    """Send the run's end and return its exit code."""
    result = state.read_result(run)
    if result is None:
        code, message = 1, broken or state.lost_message(run)
    else:
        code, message = result.returncode or 0, ""
    output.send(End(code, message))
    return code


def _pass_on_stops(stdin: Input, stop: Callable[[Any], None], alive_within: float = 0.0) -> None:
    """In a thread, pass each Stop to `stop`, and None at the end of the input."""
    with contextlib.suppress(OSError):  # no standard input
        while line := stdin.line(alive_within):
            with contextlib.suppress(ValueError):  # a message of another version
                said = decode(line)
                if isinstance(said, Stop):
                    stop(said)
    stop(None)


class Node:
    """One host's part of a run."""

    def __init__(self, order: NodeOrder, output: NodeOutput) -> None:
        self._order = order
        self._output = output
        self.run_dir = RunDir(order.run)
        self._supervisor: SupervisorProcess | None = None
        self._let_go = threading.Event()

    def run(self) -> int:
        """Run until the run has ended on this host, or is detached; return the exit status."""
        order = self._order
        started = self._read_start()
        machine = detect_machine(os.environ, patience=PATIENCE)
        spec = self._localized(state.read_spec(self.run_dir))
        require_one_host(spec.backend, spec.device, len(spec.hosts))
        self._output.send(Hello(spec.id, order.node_rank, spec.hosts[order.node_rank]))
        env = self._environment(spec, machine, started)
        join = None
        if len(spec.hosts) > 1:
            join = JoinHosts(
                dir=str(self.run_dir.path),
                node_rank=order.node_rank,
                address=order.address,
                leader=order.leader,
                port=order.port,
                key=started.key,
                facts=facts(self.run_dir, spec, machine),
                beat=started.beat,
                lost_after=started.lost_after,
                patience=started.patience,
            )
        supervisor = SupervisorProcess(environment.fork_server_environment(env))
        self._supervisor = supervisor
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        device = "tpu" if spec.device == "TPU" else None
        supervisor.run(self.run_dir.path, env, device=device, detached=order.detach, join=join)
        threading.Thread(
            target=_pass_on_stops,
            args=[order.stdin, self._on_stop, started.alive_within],
            daemon=True,
        ).start()
        over = self._detached_is_over if order.detach else self._is_over
        _send_folder(self.run_dir, {}, self._output, over)
        if self._let_go.is_set():
            supervisor.detach()
            return 0
        broken = supervisor.broken
        supervisor.close()
        return _end(self.run_dir, self._output, broken)

    def _is_over(self) -> bool:
        assert self._supervisor is not None
        return self._supervisor.has_finished(self.run_dir.path)

    def _detached_is_over(self) -> bool:
        return self._let_go.is_set() or self._is_over()

    def _read_start(self) -> Start:
        try:
            said = decode(self._order.stdin.line())
        except ValueError:
            said = None
        if not isinstance(said, Start):
            raise TpunbError("the first line of standard input does not start a run")
        return said

    def _localized(self, spec: RunSpec) -> RunSpec:
        """Write and return the spec with this machine's paths."""
        cwd = Path(spec.cwd).expanduser().absolute()
        own = [entry for entry in sys.path if entry]
        given = [str(cwd / Path(entry).expanduser()) for entry in spec.sys_path]
        sys_path = dict.fromkeys([*given, *own])
        spec = replace(spec, cwd=str(cwd), sys_path=("", *sys_path))
        self.run_dir.write_spec(spec)
        return spec

    def _environment(self, spec: RunSpec, machine: Machine, started: Start) -> dict[str, str]:
        variables = dict(started.variables)
        if spec.spmd is not None:
            shown = "the run's spec"
            cores = spec.spmd // len(spec.hosts)
            made = environment.spmd_environment(os.environ, variables, machine, cores, shown)
            assert made is not None
            return dict(made.env)
        return environment.run_environment(
            os.environ, spec.device, variables, machine, spec.backend
        )

    def _on_signal(self, number: int, frame: object) -> None:
        self._on_stop(Stop(StopCause.KERNEL_GONE, f"{signal.Signals(number).name} to tpunb node"))

    def _on_stop(self, stop: Stop | None) -> None:
        """Pass a stop to the supervisor. None: standard input has closed."""
        assert self._supervisor is not None
        if stop is None:
            if self._order.detach:
                self._let_go.set()
                return
            reason = "lost the connection to the machine that started the run"
            stop = Stop(StopCause.KERNEL_GONE, reason)
        self._supervisor.stop(self.run_dir.path, stop)


def facts(run: RunDir, spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Return facts that must be the same on all hosts of a run, with names for error messages."""
    return {
        **installed_versions(),
        "chips": str(machine.chips),
        "device": spec.device,
        "ranks on each host": str(spec.local_world_size),
        "the script": hashlib.sha256(run.script.read_bytes()).hexdigest()[:12],
    }
