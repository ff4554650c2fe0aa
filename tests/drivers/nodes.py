"""A run on the hosts of a pod: its folders, `tpunb node` on each, and what they have said."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.drivers.places import result_of
from tests.fakes.hosts import Host, Pod
from tests.support import script_of
from tpunb.runs import directory, stream
from tpunb.runs.directory import RunDir
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import RunSpec
from tpunb.runs.stream import Append, End, Hello, Line, Replace, Start, Stop

ROOT = Path(__file__).resolve().parents[2]
TORCHLESS = [sys.executable, "-m", "tests.fakes.torchless", "node"]
REAL = [sys.executable, "-m", "tpunb", "node"]
SOON = 60.0
"""Seconds that anything may take on a busy machine before a test fails."""


def until(what: Any, seconds: float = SOON) -> Any:
    """Wait until a function says something true, and return it."""
    deadline = time.monotonic() + seconds
    while not (said := what()):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)
    return said


class NodeProcess:
    """`tpunb node` on one host."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process = process
        self.folder = folder
        """The run's folder on this host."""
        self.lines: list[Line] = []
        self.files: dict[str, bytes] = {}
        """Put together from the stream."""
        self.other: list[bytes] = []
        self.bytes = 0
        """Of the stream."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.bytes += len(text)
            try:
                line = stream.decode(text)
            except ValueError:
                self.other.append(text)
                continue
            if isinstance(line, Append):
                known = self.files.get(line.file, b"")
                assert line.at <= len(known), f"a gap in {line.file}"
                self.files[line.file] = known[: line.at] + line.data
            elif isinstance(line, Replace):
                self.files[line.file] = line.data
            self.lines.append(line)

    def send(self, line: Line) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(stream.encode(line))
        self.process.stdin.flush()

    def text(self, file: str) -> str:
        return self.files.get(file, b"").decode()

    def log(self) -> list[str]:
        """The lines of run.log so far; not tpunb's own."""
        return [line for line in self.text("run.log").splitlines() if "[tpunb]" not in line]

    @property
    def hello(self) -> Hello:
        return until(lambda: next((x for x in self.lines if isinstance(x, Hello)), None))

    @property
    def end(self) -> End | None:
        return next((x for x in self.lines if isinstance(x, End)), None)

    def wait(self, seconds: float = SOON) -> int:
        """The exit status, once everything that it has said is here."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def result(self) -> RunResult:
        """As it stands in this host's folder."""
        return result_of(RunDir(self.folder))

    def failure(self) -> Failure:
        """The first one of its result."""
        failure = self.result().failure
        assert failure is not None
        return failure

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


class RunOnHosts:
    """One run on the hosts of a pod, each with a folder of its own."""

    def __init__(
        self,
        pod: Pod,
        folder: Path,
        train: str,
        *,
        ranks: int = 2,
        prelude: Iterable[str] = (),
        port: int = 29500,
        program: Sequence[str] = TORCHLESS,
        hosts: Sequence[Host] | None = None,
        **values: Any,
    ) -> None:
        """`ranks`: on each host; `values`: of the spec."""
        self.pod = pod
        self.hosts = list(hosts or pod.hosts)
        self.program = program
        self.port = port
        self.key = secrets.token_hex(32)
        self.nodes: dict[int, NodeProcess] = {}
        script = script_of(prelude, train)
        # The name makes ids differ of runs that are made in the same second.
        made = directory.create_run(folder / "made", f"pod-{folder.name}")
        names = tuple(host.name for host in self.hosts)
        self.spec = replace(
            RunSpec(
                made.id, "pod", ranks * len(names), "CPU", str(folder), (), script.blocks,
                backend="torch", hosts=names, hang_timeout=0.0, grace=5.0,
            ),
            **values,
        )  # fmt: skip
        self.folders = []
        for host in self.hosts:
            run = RunDir(folder / host.name / made.id)
            run.path.mkdir(parents=True, exist_ok=True)
            run.script.write_text(script.text)
            run.write_spec(self.spec)
            self.folders.append(run.path)

    def start(
        self,
        number: int,
        *options: str,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
        variables: Mapping[str, str] | None = None,
        **waits: float,
    ) -> NodeProcess:
        """Start it on one host. `waits`: of `Start`, in seconds."""
        host = self.hosts[number]
        process = host.popen(
            [
                *self.program,
                *("--run", self.folders[number]),
                *("--node-rank", str(number), "--address", host.address),
                *("--leader", self.hosts[0].address, "--port", str(self.port)),
                *options,
            ],
            env={"PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        node = NodeProcess(process, self.folders[number])
        waits = {"beat": 0.2, "lost_after": 3.0, "patience": 60.0, **waits}
        node.send(Start(key or self.key, dict(variables or {}), **waits))
        self.nodes[number] = node
        return node

    def follow(self, number: int, since: Mapping[str, int]) -> NodeProcess:
        """Follow what was started before, from these offsets on."""
        process = self.hosts[number].popen(
            [*self.program, "--run", self.folders[number], "--follow"],
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        node = self.nodes[number] = NodeProcess(process, self.folders[number])
        process.stdin.write((json.dumps(dict(since)) + "\n").encode())
        process.stdin.flush()
        return node

    def start_all(self, *options: str, **more: Any) -> None:
        for number in range(len(self.hosts)):
            self.start(number, *options, **more)

    def await_lines(self, text: str, count: int | None = None) -> None:
        """Wait until so many lines of the run's logs hold this; one for each rank by default."""
        wanted = self.spec.world_size if count is None else count
        until(lambda: sum(text in line for n in self.nodes.values() for line in n.log()) >= wanted)

    def wait(self, *numbers: int) -> list[int]:
        """The exit statuses of these nodes, or of all."""
        return [self.nodes[number].wait() for number in (numbers or self.nodes)]

    def stop(self, number: int, reason: str = "enough", *, now: bool = False) -> None:
        self.nodes[number].send(Stop(reason=reason, now=now))

    def left(self) -> list[int]:
        """Processes that are left on any host."""
        return [pid for host in self.hosts for pid in host.processes()]

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        for node in self.nodes.values():
            node.wait()
            node.close()
