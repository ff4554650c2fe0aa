"""`tpunb node`: runs the supervisor on one host of a run on several hosts.

    starter (mirror, ssh, pod) ── stdin, the lifeline ──> this process ── pipes ──> supervisor
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
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.machine import environment, hosts
from tpunb.machine.hosts import Identity
from tpunb.machine.machine import Machine, detect_machine, root_of
from tpunb.machine.metadata import PATIENCE, read_all
from tpunb.places import remote
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.folder_stream import FolderStream
from tpunb.runs.protocol import JoinHosts
from tpunb.runs.spec import RunSpec, RunState, Stop, StopCause, StopOrigin
from tpunb.runs.stream import ARCHIVE, End, Hello, Line, Received, Replace, Start, decode, encode
from tpunb.utils import env_vars, records
from tpunb.utils.errors import SetupError, TpunbError
from tpunb.utils.files import LineBuffer, LineTail
from tpunb.utils.version import installed_versions

POLL_INTERVAL = 0.04
"""Seconds between polls of the run folder."""
RETRY = 1.0
"""Seconds between attempts to look up host 0, whose name may appear later than this host starts."""
REFUSED = 2
"""Exit status if nothing was started."""
ALIVE_WITHIN = 60.0
"""Seconds without a line after which a pod's follower counts as gone."""
LAST_WORDS = 4_000_000
"""Maximum bytes of a run's files that are written to a pod's log if no follower has taken them."""
LINGER_AT_MOST = 3600.0
"""Maximum seconds for which a pod waits while its files are fetched."""
VARIABLES = "variables.json"
"""File in the run folder with variables for the ranks, possibly secrets; removed once read."""


@dataclass(frozen=True)
class NodeOrder:
    """The options of `tpunb node`, and its standard streams."""

    run: Path
    nnodes: int | None = None
    node_rank: int | None = None
    rendezvous: str | None = None
    address: str | None = None
    key_file: str | None = None
    files: Path | None = None
    """Folder, such as a read-only ConfigMap, whose files are copied to the run folder; or None."""
    dry_run: bool = False
    stream: bool = False
    detach: bool = False
    heartbeat: float = 2.0
    lost_after: float = 20.0
    patience: float = 300.0
    linger: float = 0.0
    """Seconds for which a finished run waits for a follower to fetch its files."""
    alone: float = 0.0
    """Seconds without a follower after which the run is stopped; 0: never."""
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
    presence = _Presence(run)
    try:
        if since == "-":
            known = records.convert(Mapping[str, int], records.parse(order.stdin.line()))
        elif since is not None:
            known = records.convert(Mapping[str, int], records.read(Path(since)))
    except (OSError, ValueError) as error:
        raise TpunbError(f"--since {since}: {error}") from None
    left, taken = threading.Event(), threading.Event()
    waiting: list[Stop] = []

    def request(stop: Stop | Received | None) -> None:
        if isinstance(stop, Received):
            presence.take()
            taken.set()
        elif stop is not None and not run.spec.exists():
            waiting.append(stop)
        elif stop is not None:
            state.request_stop(run, stop)
        elif since == "-":  # standard input has closed: the follower is gone
            left.set()

    def follower_is_gone() -> bool:
        return output.closed or left.is_set()

    alive = ALIVE_WITHIN if order.linger else 0.0
    listener = threading.Thread(
        target=_pass_on_stops, args=[order.stdin, request, alive], daemon=True
    )
    listener.start()

    def over() -> bool:
        presence.note()
        return follower_is_gone() or not state.run_state(run).active

    if order.linger:
        _wait_for_folder(run, follower_is_gone)
        for stop in waiting:
            request(stop)
    if follower_is_gone():
        return 0
    state.read_spec(run)  # raises TpunbError if this is not a run folder
    _send_folder(run, known, order, output, over)
    if follower_is_gone():
        return 0
    code = _end(run, order, output)
    while order.linger and not taken.wait(1.0) and not follower_is_gone():
        presence.note()  # the follower is fetching files
    return code


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


def _wait_for_folder(run: RunDir, over: Callable[[], bool]) -> None:
    """Wait until the run has begun: a pod's follower may connect before that."""
    while not over() and not (run.spec.exists() and (run.lock.exists() or run.result.exists())):
        time.sleep(POLL_INTERVAL)


class _Presence:
    """Marks in the run folder by which a node knows about its followers, in other processes."""

    def __init__(self, run: RunDir) -> None:
        self._seen = run.path / ".followed"
        self._taken = run.path / ".taken"

    def note(self) -> None:
        """Mark that a follower is connected now."""
        with contextlib.suppress(OSError):
            self._seen.touch()

    def take(self) -> None:
        """Mark that a follower has taken all files."""
        with contextlib.suppress(OSError):
            self._taken.touch()

    @property
    def taken(self) -> bool:
        return self._taken.exists()

    def age(self) -> float:
        """Return the seconds since the last mark of a follower; infinity if there was none."""
        try:
            return time.time() - self._seen.stat().st_mtime
        except OSError:
            return float("inf")


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
    """In a thread, pass each Stop and Received to `stop`, and None at the end of the input."""
    with contextlib.suppress(OSError):  # no standard input
        while line := stdin.line(alive_within):
            with contextlib.suppress(ValueError):  # a message of another version
                said = decode(line)
                if isinstance(said, (Stop, Received)):
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
        self._evicted = False
        """True if a signal of the platform ends this process."""

    def run(self) -> int:
        """Run until the run has ended on this host, or is detached; return the exit status."""
        order = self._order
        if order.lost_after < 2 * order.heartbeat:
            raise SetupError(
                f"--lost-after {order.lost_after:g} must be at least twice --heartbeat "
                f"{order.heartbeat:g}: one heartbeat may be late"
            )
        started = self._read_start()
        if order.files is not None:
            _copy_files(order.files, order.run)
        spec = state.read_spec(self.run_dir)
        machine = detect_machine(os.environ, patience=PATIENCE)
        identity = self._identify()
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
        if order.alone:
            threading.Thread(target=self._stop_when_alone, daemon=True).start()
        _send_folder(self.run_dir, {}, order, self._output, over)
        if self._let_go.is_set():
            supervisor.detach()
            return 0
        broken = supervisor.broken
        supervisor.close()
        code = _end(self.run_dir, order, self._output, broken)
        if order.linger:
            self._copy_to_bucket(env.get(env_vars.CHECKPOINTS, ""), identity.node_rank)
            self._linger()
            if not self._evicted and _stopped_on_purpose(self.run_dir):
                return 0  # with another status JobSet would restart all pods
        return code

    def _stop_when_alone(self) -> None:
        """In a thread, stop the run if it has no follower: its kernel may have vanished."""
        presence = _Presence(self.run_dir)
        began = time.monotonic()
        while min(time.monotonic() - began, presence.age()) < self._order.alone:
            time.sleep(1.0)
        self._on_stop(Stop(StopCause.KERNEL_GONE, "no process follows the run"))

    def _copy_to_bucket(self, url: str, node_rank: int) -> None:
        """Copy the run's files next to its checkpoints, for use after this pod has ended."""
        if "://" not in url:
            return
        from tpunb.places import bucket

        try:
            bucket.put_folder(self.run_dir, url, node_rank)
        except Exception as error:  # whatever a file system of fsspec's raises
            text = f"tpunb: the run's files were not copied to {url}: {error}\n"
            self._output.write(text.encode())

    def _linger(self) -> None:
        """Wait until a follower has taken the run's files; otherwise write them to the log."""
        presence = _Presence(self.run_dir)
        began = time.monotonic()
        while not presence.taken:
            waited = time.monotonic() - began
            followed = presence.age() < ALIVE_WITHIN
            if waited > LINGER_AT_MOST or (waited > self._order.linger and not followed):
                self._write_last_words()
                return
            time.sleep(POLL_INTERVAL)

    def _write_last_words(self) -> None:
        """Write the run's files as lines of a stream, up to LAST_WORDS bytes, small ones first."""
        lines = [
            encode(said)
            for said in FolderStream(self.run_dir).read(last=True)
            if not isinstance(said, Replace) or not said.file.endswith("/pulse")
        ]
        room, fits = LAST_WORDS, set()
        for number, line in sorted(enumerate(lines), key=lambda each: len(each[1])):
            room -= len(line)
            if room >= 0:
                fits.add(number)
        for number, line in enumerate(lines):  # the result is the last one
            if number in fits:
                self._output.write(line)
        result = state.read_result(self.run_dir)
        self._output.send(End(1 if result is None else result.returncode or 0))

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
        file = self.run_dir.path / VARIABLES
        with contextlib.suppress(FileNotFoundError):
            try:
                variables |= records.convert(Mapping[str, str], records.read(file))
            except ValueError as error:
                raise TpunbError(f"{file}: {error}") from None
            finally:
                file.unlink(missing_ok=True)
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
            self._evicted = True
            self._on_stop(
                Stop(StopCause.KERNEL_GONE, f"{signal.Signals(number).name} to tpunb node")
            )

        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGHUP, terminate)

    def _on_stop(self, stop: Stop | Received | None) -> None:
        """Pass a stop to the supervisor. None: standard input has closed."""
        if isinstance(stop, Received):
            return  # this process ends anyway
        assert self._supervisor is not None
        if stop is None:
            if self._order.detach:
                self._let_go.set()
                return
            reason = "lost the connection to the machine that started the run"
            stop = Stop(StopCause.KERNEL_GONE, reason)
        self._supervisor.stop(self.run_dir.path, stop)


def _stopped_on_purpose(run: RunDir) -> bool:
    """True if a run has ended because a stop or time limit was requested."""
    result = state.read_result(run)
    return result is not None and result.state in (RunState.INTERRUPTED, RunState.TIMED_OUT)


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


def _copy_files(source: Path, folder: Path) -> None:
    """Copy a run's files into its folder, which only this user can read."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.name == ARCHIVE:
                with tarfile.open(file) as archive:
                    remote.extract(archive, str(folder))
            elif file.is_file():
                (folder / file.name).touch(0o600)
                (folder / file.name).write_bytes(file.read_bytes())
    except tarfile.TarError as error:
        raise TpunbError(f"--files {source}: {ARCHIVE} cannot be read: {error}") from None
    except OSError as error:
        raise TpunbError(f"--files {source}: {error.strerror}: {error.filename}") from None


def facts(run: RunDir, spec: RunSpec, machine: Machine) -> dict[str, str]:
    """Return facts that must be the same on all hosts of a run, with names for error messages."""
    return {
        **installed_versions(),
        "chips": str(machine.chips),
        "device": spec.device,
        "ranks on each host": str(spec.local_world_size),
        "the script": hashlib.sha256(run.script.read_bytes()).hexdigest()[:12],
    }
