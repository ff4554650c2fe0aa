"""`tpunb node`: runs the supervisor on one host of a run on several hosts.

    starter (mirror, ssh) ── stdin, the lifeline ──> this process ── pipes ──> supervisor
                          <── stdout, the stream ──

This process has the role of the kernel on one machine: it determines which host this is, passes
the run folder and stops to the supervisor, and sends the contents of the run folder. It reads the
folder like any other follower, so a slow or broken connection delays nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
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
from tpunb.machine import environment, hosts
from tpunb.machine.hosts import Identity
from tpunb.machine.machine import Machine, detect_machine, root_of
from tpunb.machine.metadata import PATIENCE, read_all
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.folder_stream import FolderStream
from tpunb.runs.protocol import JoinHosts
from tpunb.runs.spec import RunSpec, Stop, StopCause, StopOrigin
from tpunb.runs.stream import End, Hello, Line, Start, decode, encode
from tpunb.utils import records
from tpunb.utils.errors import SetupError, TpunbError
from tpunb.utils.files import LineBuffer, LineTail
from tpunb.utils.version import installed_versions

POLL_INTERVAL = 0.04
"""Seconds between polls of the run folder."""
RETRY = 1.0
"""Seconds between attempts to look up host 0, whose name may appear later than this host starts."""
REFUSED = 2
"""Exit status if nothing was started."""


@dataclass(frozen=True)
class NodeOrder:
    """The options of `tpunb node`, and its standard streams."""

    run: Path
    nnodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    address: str | None = None
    key_file: str | None = None
    dry_run: bool = False
    stream: bool = False
    detach: bool = False
    heartbeat: float = 2.0
    lost_after: float = 20.0
    patience: float = 300.0
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

    def write(self, data: bytes) -> None:
        if not self.closed:
            try:
                self._file.write(data)
                self._file.flush()
            except OSError:
                self.closed = True

    def send(self, line: Line) -> None:
        self.write(encode(line))


def run_node(order: NodeOrder) -> int:
    """Run this host's part and return its exit status. Raises TpunbError if it cannot start."""
    output = NodeOutput(order.stdout)
    if order.dry_run:
        machine = detect_machine(os.environ, patience=PATIENCE)
        output.write(_describe(_identify(order), "", machine))
        return 0
    try:
        return Node(order, output).run()
    except TpunbError as error:
        if not order.stream:
            raise
        output.send(End(REFUSED, str(error)))
        return REFUSED


def follow_node(run: RunDir, since: str | None, order: NodeOrder) -> int:
    """Send the contents of a run folder, from known offsets on, until the run has ended.

    `since`: a JSON file with the number of known bytes of each file, or '-' for a line on standard
    input. The function returns early if standard output closes, or, with '-', standard input.
    """
    output = NodeOutput(order.stdout)
    known: Mapping[str, int] = {}
    try:
        if since == "-":
            known = records.convert(Mapping[str, int], records.parse(order.stdin.line()))
        elif since is not None:
            known = records.convert(Mapping[str, int], records.read(Path(since)))
    except (OSError, ValueError) as error:
        raise TpunbError(f"--since {since}: {error}") from None
    left = threading.Event()

    def request(stop: Stop | None) -> None:
        if stop is not None:
            state.request_stop(run, stop)
        elif since == "-":  # standard input has closed: the follower is gone
            left.set()

    def follower_is_gone() -> bool:
        return output.closed or left.is_set()

    def over() -> bool:
        return follower_is_gone() or not state.run_state(run).active

    threading.Thread(target=_pass_on_stops, args=[order.stdin, request], daemon=True).start()
    state.read_spec(run)  # raises TpunbError if this is not a run folder
    _send_folder(run, known, order, output, over)
    return 0 if follower_is_gone() else _end(run, order, output)


def _send_folder(
    run: RunDir,
    since: Mapping[str, int],
    order: NodeOrder,
    output: NodeOutput,
    over: Callable[[], bool],
) -> None:
    """Send everything that is in the run folder, until `over()`."""
    if not order.stream:
        lines = LineTail(run.log)
        while True:
            last = over()
            for line in lines.read():
                output.write(f"{line}\n".encode())
            if last:
                lines.close()
                return
            time.sleep(POLL_INTERVAL)
    stream = FolderStream(run, since)
    while True:
        last = over()  # checked before the files are read, so that the last lines are read too
        for said in stream.read(last=last):
            output.send(said)
        if last:
            stream.close()
            return
        time.sleep(POLL_INTERVAL)


def _end(run: RunDir, order: NodeOrder, output: NodeOutput, broken: str = "") -> int:
    """Write the run's end to the output and return its exit code."""
    result = state.read_result(run)
    if result is None:
        code, message = 1, broken or state.lost_message(run)
    else:
        code, message = result.returncode or 0, ""
    if order.stream:
        output.send(End(code, message))
    elif result is None:
        raise TpunbError(message)
    else:
        output.write(f"tpunb: {state.describe_end(run)}\n".encode())
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
        if order.lost_after < 2 * order.heartbeat:
            raise SetupError(
                f"--lost-after {order.lost_after:g} must be at least twice --heartbeat "
                f"{order.heartbeat:g}: one heartbeat may be late"
            )
        started = self._read_start()
        spec = state.read_spec(self.run_dir)
        machine = detect_machine(os.environ, patience=PATIENCE)
        identity = self._identify()
        require_one_host(spec.backend, spec.device, identity.nnodes)
        spec = self._localized(spec, identity)
        key = self._key(started, identity)
        self._send_hello(spec, identity, machine)
        env = self._environment(spec, machine, started)
        join = None
        if identity.nnodes > 1:
            join = JoinHosts(
                dir=str(self.run_dir.path),
                node_rank=identity.node_rank,
                address=identity.address,
                leader=identity.leader,
                port=identity.port,
                key=key,
                facts=facts(self.run_dir, spec, machine),
                beat=order.heartbeat,
                lost_after=order.lost_after,
                patience=order.patience,
            )
        supervisor = SupervisorProcess(environment.fork_server_environment(env))
        self._supervisor = supervisor
        self._take_signals()
        device = "tpu" if spec.device == "TPU" else None
        supervisor.run(self.run_dir.path, env, device=device, detached=order.detach, join=join)
        if order.stream or order.detach:
            listener = threading.Thread(
                target=_pass_on_stops,
                args=[order.stdin, self._on_stop, started.alive_within if started else 0.0],
                daemon=True,
            )
            listener.start()
        over = self._detached_is_over if order.detach else self._is_over
        _send_folder(self.run_dir, {}, order, self._output, over)
        if self._let_go.is_set():
            supervisor.detach()
            return 0
        broken = supervisor.broken
        supervisor.close()
        return _end(self.run_dir, order, self._output, broken)

    def _is_over(self) -> bool:
        assert self._supervisor is not None
        return self._supervisor.has_finished(self.run_dir.path)

    def _detached_is_over(self) -> bool:
        return self._let_go.is_set() or self._is_over()

    def _read_start(self) -> Start | None:
        if self._order.key_file != "-":
            return None
        try:
            said = decode(self._order.stdin.line())
        except ValueError as error:
            raise TpunbError(
                f"--key-file -: the first line of standard input does not contain the key ({error})"
            ) from None
        if not isinstance(said, Start):
            raise TpunbError(
                "--key-file -: the first line of standard input does not contain the key"
            )
        return said

    def _key(self, started: Start | None, identity: Identity) -> str:
        """Return the run's key as hexadecimal digits."""
        file = self._order.key_file
        key = "" if started is None else started.key
        if file not in (None, "-"):
            try:
                key = Path(str(file)).read_text(encoding="ascii").strip()
            except (OSError, ValueError) as error:
                raise TpunbError(f"--key-file {file}: {error}") from None
        if identity.nnodes == 1:
            return key or secrets.token_hex(32)
        try:
            if len(bytes.fromhex(key)) >= 16:
                return key
        except ValueError:
            pass
        raise SetupError(
            "a run on several hosts needs a key, at least 32 hexadecimal digits, the same on all "
            "hosts: write it to a file and add --key-file FILE"
        )

    def _identify(self) -> Identity:
        order = self._order
        identity = _identify(order)
        deadline = time.monotonic() + order.patience
        while True:
            try:
                return hosts.with_addresses(identity)
            except SetupError:
                late = identity.node_rank > 0 and not hosts.is_address(identity.leader)
                if not late or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY)

    def _localized(self, spec: RunSpec, identity: Identity) -> RunSpec:
        """Return the spec with this machine's paths, and with the hosts if it has none."""
        if len(spec.hosts) != identity.nnodes:
            if spec.hosts:
                raise SetupError(
                    f"the run is for {len(spec.hosts)} hosts ({', '.join(spec.hosts)}), but "
                    f"according to {identity.source} there are {identity.nnodes}"
                )
            names = identity.hosts or tuple(f"host-{n}" for n in range(identity.nnodes))
            if identity.nnodes > 1:
                spmd = None if spec.spmd is None else spec.spmd * identity.nnodes
                world_size = spec.world_size * identity.nnodes
                spec = replace(spec, hosts=names, world_size=world_size, spmd=spmd)
        cwd = Path(spec.cwd).expanduser().absolute()
        own = [entry for entry in sys.path if entry]
        given = [str(cwd / Path(entry).expanduser()) for entry in spec.sys_path]
        sys_path = dict.fromkeys([*given, *own])
        spec = replace(spec, cwd=str(cwd), sys_path=("", *sys_path))
        self.run_dir.write_spec(spec)
        return spec

    def _environment(
        self, spec: RunSpec, machine: Machine, started: Start | None
    ) -> dict[str, str]:
        variables = dict(started.variables) if started is not None else {}
        if spec.spmd is not None:
            shown = "the run's spec"
            cores = spec.spmd // max(1, len(spec.hosts))
            made = environment.spmd_environment(os.environ, variables, machine, cores, shown)
            assert made is not None
            return dict(made.env)
        return environment.run_environment(
            os.environ, spec.device, variables, machine, spec.backend
        )

    def _send_hello(self, spec: RunSpec, identity: Identity, machine: Machine) -> None:
        name = spec.hosts[identity.node_rank] if spec.hosts else os.uname().nodename
        hello = Hello(
            run=spec.id,
            node_rank=identity.node_rank,
            nnodes=identity.nnodes,
            host=name,
            address=identity.address,
            source=identity.source,
            rendezvous=f"{identity.leader}:{identity.port}",
            versions=installed_versions(),
            chips=machine.chips,
            pid=os.getpid(),
            time=time.time(),
        )
        if self._order.stream:
            self._output.send(hello)
            return
        shown = f" ({name}, {hello.address})"
        self._output.write(_describe(identity, shown, machine))

    def _take_signals(self) -> None:
        pressed = 0

        def interrupt(number: int, frame: object) -> None:
            nonlocal pressed
            pressed += 1
            self._on_stop(Stop(StopCause.USER, "interrupted", StopOrigin.COMMAND, pressed > 1))

        def terminate(number: int, frame: object) -> None:
            self._on_stop(
                Stop(StopCause.KERNEL_GONE, f"{signal.Signals(number).name} to tpunb node")
            )

        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGHUP, terminate)

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


def _identify(order: NodeOrder) -> Identity:
    """Determine which host this is, without looking up any name."""
    env = os.environ
    return hosts.identify(
        env,
        lambda: read_all(env, root_of(env), PATIENCE),
        nnodes=order.nnodes,
        node_rank=order.node_rank,
        rendezvous=order.rendezvous,
        address=order.address,
    )


def _describe(identity: Identity, shown: str, machine: Machine) -> bytes:
    """Describe for the user which host this is, its chips and its packages."""
    found = ", ".join(f"{package} {v}" for package, v in installed_versions().items() if v)
    chips = f"{machine.chips} TPU chips" if machine.chips else "no TPU"
    return (
        f"tpunb: host {identity.node_rank} of {identity.nnodes}{shown}, known from "
        f"{identity.source}; host 0 listens at {identity.leader}:{identity.port}\n"
        f"tpunb: {chips}; {found}\n"
    ).encode()


def facts(run: RunDir, spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Return facts that must be the same on all hosts of a run, with names for error messages."""
    return {
        **installed_versions(),
        "chips": str(machine.chips),
        "device": spec.device,
        "ranks on each host": str(spec.local_world_size),
        "the script": hashlib.sha256(run.script.read_bytes()).hexdigest()[:12],
    }
