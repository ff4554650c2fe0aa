"""Starts runs and follows them to their end. One Launcher for a kernel; it keeps a guard warm."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tpunb import accounts, control, rundir, vitals
from tpunb.board import Board
from tpunb.errors import TpunbError
from tpunb.events import Ended, Event, Metric, Note, RanksStarted
from tpunb.models import Device, Failure, RunResult, RunSpec, Script, Snapshot
from tpunb.platforms import environment
from tpunb.process import GuardProcess
from tpunb.rundir import Follower, RunDir

LOOK = 0.04
"""Seconds between two looks into the run folder: quick to the eye, and cheap."""

VITALS = 0.5
"""Seconds between two looks at how the ranks stand."""


DEVICES: dict[Device, str | None] = {"TPU": "tpu", "CPU": None}
"""What only one run of a user on a machine can use, by kind. Processors can be shared."""


def follow(run: RunDir, ranks: int, gone: Callable[[], bool]) -> Iterator[Event | None]:
    """What happens in a run, from its start; None whenever nothing did. Ends after `Ended`.

    `gone` is asked before each look whether nobody will write any more; then it ends without
    `Ended`, once everything was read.
    """
    follower, board = Follower(run, ranks), Board(run, ranks)
    started: RanksStarted | None = None
    looked = 0.0
    try:
        end: Event | None = None
        while True:
            last = gone()  # asked before the files are read: what was written last is read below
            anything = False
            for event in follower.read():
                anything = True
                if isinstance(event, Ended):
                    end = event
                    continue
                if isinstance(event, RanksStarted):
                    started, looked = event, 0.0
                if isinstance(event, Metric):
                    board.add(event)
                yield event
            if started is not None and end is None and time.monotonic() - looked >= VITALS:
                yield vitals.look(run, started.attempt, started.pids)
                looked = time.monotonic()
            if not anything and end is not None:
                if board.problem:
                    yield Note(f"TensorBoard's file is not complete: {board.problem}")
                yield end
                return
            if not anything and last:
                return
            if not anything or end is None:
                yield None
                time.sleep(LOOK)
    finally:
        board.close()
        follower.close()


class Run:
    """A run that was started: follow it with `events`, end it with `stop`."""

    def __init__(self, folder: RunDir, spec: RunSpec, guard: GuardProcess) -> None:
        self.dir = folder
        self.spec = spec
        self._guard = guard

    def events(self) -> Iterator[Event | None]:
        """What happens, as it happens, until no process is left; None whenever nothing did."""
        gone = partial(self._guard.is_done_with, self.dir.path)
        yield from follow(self.dir, self.spec.world_size, gone)
        while not gone():  # what it says of the end comes right after it
            time.sleep(LOOK / 10)
        if problem := self._guard.said_of(self.dir.path).get("problem"):
            yield Note(f"the run folder does not hold everything: {problem}")

    def stop(self, why: str, reason: str, *, now: bool = False) -> None:
        """Begin the stop ladder; with `now`, skip what is left of the grace period."""
        self._guard.stop(self.dir.path, why, reason, now=now)

    def result(self) -> RunResult:
        """How it ended, and why if it failed. Only after `events` has come to its end."""
        return explained(self._ended())

    def _ended(self) -> RunResult:
        if (written := control.read_result(self.dir)) is not None:
            return written
        if unwritten := self._guard.said_of(self.dir.path).get("result"):
            return RunResult.from_json(unwritten, self.dir.path)
        return self._lost()

    def _lost(self) -> RunResult:
        """The guard is gone without a result, so nobody else can write one any more."""
        now = time.time()
        failure = Failure(
            rank=None, pid=self._guard.pid, exitcode=None, signal=None, type="Lost",
            message=self._guard.broken or "the guard has ended", cell=None, line=None,
            traceback="", time=now,
        )  # fmt: skip
        result = RunResult(
            state="failed",
            name=self.spec.name,
            world_size=self.spec.world_size,
            spmd=self.spec.spmd,
            device=self.spec.device,
            started=self.dir.spec.stat().st_mtime,
            ended=now,
            dir=self.dir.path,
            returncode=1,
            failures=(failure,),
            warm=self.spec.warm,
            replicated=self.spec.replicate is not None,
            replicate_reason=self.spec.replicate or "",
            price=self.spec.price,
        )
        with contextlib.suppress(OSError):  # the disk may be full: then it is said here only
            self.dir.write_result(result)
            self.dir.emit(Ended("failed"))
        return result


class Attached:
    """A run that somebody else has started, followed through its folder."""

    def __init__(self, folder: RunDir) -> None:
        self.dir = folder
        self.spec = control.read_spec(folder)

    def events(self) -> Iterator[Event | None]:
        """Everything from its start, and then what happens until it has ended."""
        return follow(self.dir, self.spec.world_size, self._gone)

    def _gone(self) -> bool:
        return control.state(self.dir) not in control.ALIVE

    def result(self) -> RunResult:
        """How it ended. Only after `events` has come to its end; TpunbError if it is lost."""
        result = control.read_result(self.dir)
        if result is None:
            raise TpunbError(control.lost(self.dir))
        return explained(result)


def explained(result: RunResult) -> RunResult:
    """The same, summed up, and with what its log says about the causes of a failure."""
    result = replace(result, summary=accounts.of(result))
    if result.state not in ("failed", "hung"):
        return result
    from tpunb.diagnosis.runs import of_run  # the rules are read only when they are needed

    return replace(result, diagnoses=tuple(of_run(result)))


class Launcher:
    """Runs one notebook's train cells, one at a time, on a guard that is kept for the next."""

    def __init__(self) -> None:
        self._guard: GuardProcess | None = None
        self._busy: list[GuardProcess] = []
        """Guards that no later run can use, with runs in the background that still go on."""
        self._key: object = None
        self._replicate: dict[str, str] = {}

    def warm(self, env: Mapping[str, str]) -> GuardProcess:
        """A guard whose agent fits this run environment; started now if there is none.

        One that was started for another interpreter, other packages or other variables that
        are read at import is put away first.
        """
        key = _fingerprint(env)
        guard = self._guard
        if guard is not None:
            guard.hear()
            if guard.broken or key != self._key:
                self.put_away()
                guard = None
        if guard is None:
            guard = GuardProcess(environment.for_agent(env))
            self._guard, self._key = guard, key
        return guard

    @property
    def is_warm(self) -> bool:
        """Whether an agent has imported everything and waits."""
        if self._guard is not None:
            self._guard.hear()
        return self._guard is not None and self._guard.ready

    def put_away(self) -> None:
        """End the guard and all below it; one that has a run in the background, when that ends."""
        guard, self._guard = self._guard, None
        if guard is not None:
            self._busy.append(guard)
        for guard in list(self._busy):
            guard.hear()
            if not guard.busy:
                guard.close()
                self._busy.remove(guard)

    def close(self, wait: float = 60.0) -> None:
        """End every guard and all below it, also runs in the background, with time to save."""
        guards = [*self._busy, *([] if self._guard is None else [self._guard])]
        self._busy, self._guard = [], None
        for guard in guards:
            guard.let_go()
        for guard in guards:
            guard.close(wait)

    def start(
        self, folder: RunDir, spec: RunSpec, script: Script, snapshot: Snapshot,
        env: Mapping[str, str], *, detached: bool = False,
    ) -> Run | Attached:  # fmt: skip
        """Write everything that is known about a run into its folder, and start it.

        It waits for those that were started before it here and still go on; on a TPU for all
        that this user has on this machine. A run that is `detached` waits for those on a TPU
        only. It outlives this process and takes the guard with it, of which nothing is heard
        any more: it is followed as others follow it.
        """
        known = self._replicate.get(_prelude(script))
        if spec.replicate is None and known is not None:
            spec = replace(spec, replicate=known)
        guard = self.warm(env)
        if detached and guard.busy:
            guard = GuardProcess(environment.for_agent(env))
        guard.hear()
        spec = replace(spec, warm=guard.ready)
        folder.script.touch(0o600)
        folder.script.write_text(script.text, encoding="utf-8")
        rundir.write_json(folder.snapshot, asdict(snapshot))
        rundir.write_json(folder.env, environment.without_secrets(env))
        rundir.write_json(folder.spec, spec.to_json())
        if spec.replicate is not None:
            folder.emit(Note(f"every rank runs the prelude itself: {spec.replicate}"))
        guard.run(folder.path, dict(env), device=DEVICES[spec.device], detached=detached)
        if not detached:
            return Run(folder, spec, guard)
        if guard is self._guard:
            self._guard = None
        guard.forget()
        self.warm(env)
        return Attached(folder)

    def remember(self, script: Script, result: RunResult, spec: RunSpec) -> None:
        """A prelude that could not be followed by a fork goes to replicate directly next time."""
        if result.replicated and spec.replicate is None:
            self._replicate[_prelude(script)] = result.replicate_reason


def _prelude(script: Script) -> str:
    return "".join(script.source(block) for block in script.blocks if block.role == "prelude")


def _fingerprint(env: Mapping[str, str]) -> object:
    """What an agent that is already warm cannot follow: interpreter, packages, variables."""
    packages = []
    for entry in sys.path:
        path = Path(entry)
        if path.name in ("site-packages", "dist-packages") and path.is_dir():
            packages.append((entry, path.stat().st_mtime_ns))
    return json.dumps([sys.executable, packages, environment.read_at_import(env)], sort_keys=True)
