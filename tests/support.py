"""What several test modules share: scripts made by hand, and runs driven to their end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from tpunb.kernel.launcher import Attached, Launcher, Run
from tpunb.machine import environment
from tpunb.notebook.models import Script, Snapshot
from tpunb.runs import directory, returns
from tpunb.runs.events import Event
from tpunb.runs.result import RunResult
from tpunb.runs.spec import Block, RunSpec
from tpunb.utils import processes
from tpunb.utils.memory import FIRST_TO_GO
from tpunb.utils.processes import Process


def examples(count: int) -> int:
    """How many examples hypothesis tries: a quarter of `count`, except in CI."""
    return count if os.environ.get("CI") == "true" else count // 4


def script_of(prelude: Iterable[str], train: str, numbers: Sequence[int] | None = None) -> Script:
    """A script whose cells have the numbers 1, 2, … and the train cell the last.

    `numbers`: other ones for the prelude's cells.
    """
    lines = ["made_by = 'hand'"]
    blocks = [Block("header", 1, 1)]
    cells = [("prelude", cell) for cell in prelude] + [("train", train)]
    for index, (role, source) in enumerate(cells):
        source = dedent(source).strip("\n")
        first = len(lines) + 1
        lines += source.split("\n")
        number = numbers[index] if numbers and role == "prelude" else index + 1
        blocks.append(Block(role, first, len(lines), index, number))  # type: ignore[arg-type]
    return Script("\n".join(lines) + "\n", tuple(blocks))


@dataclass
class Seen:
    """A run that has ended, and what was seen of it."""

    result: RunResult
    events: list[Event] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def log(self) -> list[str]:
        """What the ranks wrote; not tpunb's own lines."""
        text = (self.result.dir / "run.log").read_text(encoding="utf-8")
        return [line for line in text.splitlines() if not line.startswith("[tpunb] ")]


def left_below(supervisor: int) -> list[Process]:
    """The processes below a supervisor without those that wait: fork server, kept preludes."""
    server = fork_server(supervisor)
    below = processes.descendants(supervisor)
    return [process for process in below if process != server and not is_kept(process)]


def fork_server(supervisor: int) -> Process | None:
    """The one process below a supervisor that shares its lifeline, its standard input."""
    for process in processes.descendants(supervisor):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lifeline = Path(f"/proc/{supervisor}/fd/0").readlink()
            if lifeline in [fd.readlink() for fd in Path(f"/proc/{process.pid}/fd").iterdir()]:
                return process
    return None


def is_kept(process: Process) -> bool:
    """Whether it is a kept prelude: the first that goes when memory runs out."""
    try:
        return Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == FIRST_TO_GO
    except (FileNotFoundError, ProcessLookupError):
        return False


class Driver:
    """Runs hand-made scripts one after the other on one warm launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = Launcher()

    @property
    def supervisor_pid(self) -> int:
        assert self.launcher.supervisor is not None
        return self.launcher.supervisor.pid

    def env(self, **extra: str) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        return environment.run_environment(own, "CPU", extra)

    def warm(self) -> None:
        """Start the fork server and wait until it is ready."""
        self.launcher.warm(self.env())
        deadline = time.monotonic() + 300  # it imports torch_xla, on a machine that is busy
        while not self.launcher.is_warm:
            assert time.monotonic() < deadline, "the fork server is not ready"
            time.sleep(0.05)

    def run(
        self,
        prelude: Iterable[str],
        train: str,
        *,
        ranks: int = 2,
        when: Callable[[Event], bool] | None = None,
        then: Callable[[Any], None] | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        numbers: Sequence[int] | None = None,
        **values: Any,
    ) -> Seen:
        """One run; after the first event for which `when` is true, `then` is called with it."""
        started = time.monotonic()
        run, script = self.start(
            prelude, train, ranks=ranks, env=env, cwd=cwd, numbers=numbers, **values
        )
        events: list[Event] = []
        for event in run.events():
            if event is None:
                continue
            events.append(event)
            if when is not None and then is not None and when(event):
                then(run)
                when = None
        result = returns.collect_returns(run.result(), run.spec)
        self.launcher.remember(script, result, run.spec)
        return Seen(result, events, time.monotonic() - started)

    def start(
        self,
        prelude: Iterable[str],
        train: str,
        *,
        ranks: int = 2,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        detached: bool = False,
        numbers: Sequence[int] | None = None,
        **values: Any,
    ) -> tuple[Run | Attached, Script]:
        """Start a run, and go on."""
        script = script_of(prelude, train, numbers)
        folder = directory.create_run(self.folder, "test")
        spec = RunSpec(
            id=folder.id,
            name="test",
            world_size=ranks,
            device="CPU",
            cwd=cwd or os.getcwd(),
            sys_path=tuple(sys.path),
            blocks=script.blocks,
            **values,
        )
        environ = self.env(**(env or {}))
        snapshot = Snapshot((), None, None, "test")
        return self.launcher.start(
            folder, spec, script, snapshot, environ, detached=detached
        ), script
