"""A run on the hosts of a pod: its supervisor on this machine, and `tpunb node` on each host."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.drivers.places import result_of
from tests.fakes.hosts import Host, Pod
from tests.support import script_of
from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.runs import directory, protocol
from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import NodeCommand, StartNode
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, Stop

ROOT = Path(__file__).resolve().parents[2]
TORCHLESS = [sys.executable, "-m", "tests.fakes.torchless", "node"]
REAL = [sys.executable, "-m", "tpunb", "node"]
RELAY = """
import contextlib, os, subprocess, sys, threading
node = subprocess.Popen(sys.argv[1:], stdin=-1, stdout=-1, start_new_session=True)
def pump(source, target):
    with contextlib.suppress(BrokenPipeError):
        while data := os.read(source, 65536):
            os.write(target, data)
    os.close(target)
threading.Thread(target=pump, args=(0, node.stdin.fileno()), daemon=True).start()
pump(node.stdout.fileno(), 1)
sys.exit(node.wait())
"""
"""As ssh does: when it is killed, what it has started sees its pipes closed, and goes on."""
SOON = 60.0
"""Seconds that anything may take on a busy machine before a test fails."""


def until(what: Any, seconds: float = SOON) -> Any:
    """Wait until a function says something true, and return it."""
    deadline = time.monotonic() + seconds
    while not (said := what()):
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)
    return said


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
        self.port = port
        self.programs = [list(program) for _ in self.hosts]
        """The command of `tpunb node` on each host."""
        script = script_of(prelude, train)
        # The name makes ids differ of runs that are made in the same second.
        self.dir = directory.create_run(folder / "made", f"pod-{folder.name}")
        names = tuple(host.name for host in self.hosts)
        self.spec = replace(
            RunSpec(
                self.dir.id, "pod", ranks * len(names), "CPU", str(folder), (), script.blocks,
                backend="torch", hosts=names, hang_timeout=0.0, grace=5.0,
            ),
            **values,
        )  # fmt: skip
        self.folders = []
        for path in (self.dir.path, *(folder / name / self.dir.id for name in names)):
            run = RunDir(path)
            run.path.mkdir(parents=True, exist_ok=True)
            run.script.write_text(script.text)
            run.write_spec(self.spec)
            self.folders.append(run.path)
        del self.folders[0]
        self.supervisor = SupervisorProcess(None)

    def start(
        self,
        variables: Mapping[str, str] | None = None,
        *,
        detached: bool = False,
        fetch: tuple[str, ...] = (),
    ) -> None:
        """Start it on all hosts; `fetch` stands for the command that fetches large results."""
        nodes = [
            NodeCommand(
                (
                    *(sys.executable, "-c", RELAY, *host.enter()),
                    *("env", f"HOME={host.home}", f"PYTHONPATH={ROOT}", *self.programs[number]),
                ),
                StartNode(
                    str(self.folders[number]),
                    dict(variables or {}),
                    number,
                    host.address,
                    self.port,
                ),
            )
            for number, host in enumerate(self.hosts)
        ]
        pod = protocol.Pod(tuple(nodes), ("true",), fetch)
        self.supervisor.run(self.dir.path, {}, pod=pod, detached=detached)
        if detached:
            self.supervisor.detach()

    def log(self) -> list[str]:
        """The lines of run.log so far; not tpunb's own."""
        return [line for line in self.text("run.log").splitlines() if "[tpunb]" not in line]

    def await_lines(self, text: str, count: int | None = None) -> None:
        """Wait until so many lines of the run's log hold this; one for each rank by default."""
        wanted = self.spec.world_size if count is None else count
        until(lambda: sum(text in line for line in self.log()) >= wanted)

    def wait(self, seconds: float = SOON) -> RunResult:
        """The result, once the run has ended."""
        until(lambda: self.supervisor.has_finished(self.dir.path), seconds)
        return result_of(self.dir)

    def stop(self, reason: str = "enough", *, now: bool = False) -> None:
        self.supervisor.stop(self.dir.path, Stop(reason=reason, now=now))

    def left(self) -> list[int]:
        """Processes that are left on any host."""
        return [pid for host in self.hosts for pid in host.processes()]

    def supervisor_of(self, number: int) -> int:
        """The pid of the process that `tpunb node` has become on a host."""
        for pid in self.hosts[number].processes():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if any(w == "tpunb: supervisor" or "torchless.supervise" in w for w in words):
                return pid
        raise AssertionError("it does not run there")

    def pipes(self) -> list[int]:
        """The pids of the commands that reach the hosts."""
        pid = self.supervisor.pid
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def text(self, file: str) -> str:
        path = self.dir.path / file
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        for host in self.hosts:
            host.kill()
        self.supervisor.close()
