"""Starts runs and follows them to their end, with a fork server kept ready for the next one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tpunb.kernel.supervisor import BorrowedSupervisor, SupervisorProcess
from tpunb.machine import environment
from tpunb.notebook.convert import handed
from tpunb.notebook.models import Script, Snapshot
from tpunb.runs import given, state, summary
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Event, Note
from tpunb.runs.follow import LOOK, follow_run
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import Device, FailureKind, RunSpec, RunState, StopCause, StopOrigin
from tpunb.utils import files
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    from tpunb.places.mirror import MirrorProcess
    from tpunb.places.target import Target

DEVICES: dict[Device, str | None] = {"TPU": "tpu", "CPU": None}
"""What only one run of a user on a machine can use, by kind. Processors can be shared."""


class Keeper(Protocol):
    """Who ends a run with this process: its supervisor, or the mirror of a run at a place."""

    @property
    def pid(self) -> int: ...

    @property
    def broken(self) -> str: ...

    def has_finished(self, folder: Path) -> bool: ...

    def stop(
        self,
        folder: Path,
        cause: StopCause,
        reason: str,
        *,
        origin: StopOrigin | None = None,
        now: bool = False,
    ) -> None: ...


class Run:
    """A run that was started: follow it with `events`, end it with `stop`."""

    def __init__(self, folder: RunDir, spec: RunSpec, supervisor: Keeper) -> None:
        self.dir = folder
        self.spec = spec
        self._supervisor = supervisor
        self._started = time.time()

    def events(self) -> Iterator[Event | None]:
        """What happens, as it happens, until no process is left; None whenever nothing did."""
        finished = partial(self._supervisor.has_finished, self.dir.path)
        yield from follow_run(self.dir, self.spec.world_size, finished)
        while not finished():  # the message comes right after the last event
            time.sleep(LOOK / 10)

    def stop(
        self,
        cause: StopCause,
        reason: str,
        *,
        origin: StopOrigin | None = None,
        now: bool = False,
    ) -> None:
        """Begin the shutdown sequence; `now` skips what is left of the grace period."""
        self._supervisor.stop(self.dir.path, cause, reason, origin=origin, now=now)

    def result(self) -> RunResult:
        """How it ended, and why if it failed. Only after `events` has come to its end."""
        result = state.read_result(self.dir)
        return explained(self._lost() if result is None else result)

    def _lost(self) -> RunResult:
        """The result of a run whose supervisor has written none, and never will."""
        now = time.time()
        message = self._supervisor.broken
        if not self.dir.path.exists():
            message = f"{self.dir.path} was deleted during the run: nothing says how it ended"
        elif not message:
            message = f"the result could not be written to {self.dir.path}; is its disk full?"
        failure = Failure(
            rank=None,
            pid=self._supervisor.pid,
            exitcode=None,
            signal=None,
            type="Lost",
            message=message,
            cell=None,
            line=None,
            traceback="",
            time=now,
            kind=FailureKind.LOST,
        )
        result = RunResult(
            state=RunState.FAILED,
            name=self.spec.name,
            world_size=self.spec.world_size,
            spmd=self.spec.spmd,
            device=self.spec.device,
            started=self._started,
            ended=now,
            dir=self.dir.path,
            returncode=1,
            failures=(failure,),
            warm=self.spec.warm,
            replicated=self.spec.replicate is not None,
            replicate_reason=self.spec.replicate or "",
            price=self.spec.price,
        )
        with contextlib.suppress(OSError):
            self.dir.write_result(result)
            self.dir.emit(Ended(RunState.FAILED))
        return result


class Attached:
    """A run that somebody else has started, followed through its folder."""

    def __init__(self, folder: RunDir) -> None:
        self.dir = folder
        self.spec = state.read_spec(folder)

    def events(self) -> Iterator[Event | None]:
        """Everything from its start, and then what happens until it has ended."""
        return follow_run(self.dir, self.spec.world_size, self._gone, attached=True)

    def stop(
        self,
        cause: StopCause,
        reason: str,
        *,
        origin: StopOrigin | None = None,
        now: bool = False,
    ) -> None:
        """Ask for it."""
        state.request_stop(self.dir, reason, origin=origin, now=now)

    def _gone(self) -> bool:
        return not state.run_state(self.dir).active

    def result(self) -> RunResult:
        """How it ended. Only after `events` has come to its end; TpunbError if it is lost."""
        result = state.read_result(self.dir)
        if result is None:
            raise TpunbError(state.lost_message(self.dir))
        return explained(result)


def explained(result: RunResult) -> RunResult:
    """The same, summed up, and with what its log says about the causes of a failure."""
    result = replace(result, summary=summary.summarize(result))
    if result.state not in (RunState.FAILED, RunState.HUNG):
        return result
    # The rules are read only when they are needed.
    from tpunb.diagnostics.failure.run import diagnose_run

    return replace(result, diagnoses=tuple(diagnose_run(result)))


class Launcher:
    """Runs one notebook's train cells, one at a time, on a supervisor kept for the next."""

    def __init__(self) -> None:
        self.supervisor: SupervisorProcess | None = None
        """The one that takes the next run."""
        self._retired: list[SupervisorProcess] = []
        """No later run can use them; their runs in the background still go on."""
        self._mirrors: list[MirrorProcess] = []
        """Of runs at places, which end with this process."""
        self._borrows = True
        self._fingerprint: object = None
        self._replicate: dict[str, str] = {}

    def warm(self, env: Mapping[str, str]) -> SupervisorProcess:
        """A supervisor whose fork server fits this run environment; started now if there is none.

        One that was started for another interpreter, other packages or other variables that
        are read at import is retired first.
        """
        fingerprint = fingerprint_of(env)
        supervisor = self.supervisor
        if supervisor is not None:
            supervisor.poll()
            if supervisor.broken or fingerprint != self._fingerprint:
                self.retire()
                supervisor = None
        if supervisor is None:
            borrowed = BorrowedSupervisor.find(fingerprint) if self._borrows else None
            supervisor = borrowed or SupervisorProcess(environment.fork_server_environment(env))
            self.supervisor, self._fingerprint = supervisor, fingerprint
        return supervisor

    @property
    def is_warm(self) -> bool:
        """Whether a fork server has imported everything and waits."""
        if self.supervisor is not None:
            self.supervisor.poll()
        return self.supervisor is not None and self.supervisor.ready

    def retire(self) -> None:
        """End the supervisor and all below it; one that has a run in the background, after it."""
        supervisor, self.supervisor = self.supervisor, None
        self._borrows = False
        if supervisor is not None:
            self._retired.append(supervisor)
        for supervisor in list(self._retired):
            supervisor.poll()
            if not supervisor.busy:
                supervisor.close()
                self._retired.remove(supervisor)

    def close(self, wait: float = 60.0) -> None:
        """End every supervisor and all below it, also runs in the background, with time to save."""
        supervisors = [*self._retired, *([] if self.supervisor is None else [self.supervisor])]
        self._retired, self.supervisor = [], None
        mirrors, self._mirrors = self._mirrors, []
        kept: list[SupervisorProcess | MirrorProcess] = [*supervisors, *mirrors]
        for each in kept:
            each.begin_close()
        for each in kept:
            each.close(wait)

    def start(
        self,
        folder: RunDir,
        spec: RunSpec,
        script: Script,
        snapshot: Snapshot,
        env: Mapping[str, str],
        *,
        restored: Mapping[str, str] = MappingProxyType({}),
        detached: bool = False,
    ) -> Run | Attached:
        """Write everything that is known about a run into its folder, and start it.

        `restored` are the values of `spec.restored`, which no file holds: they may be secrets.

        It waits for those that were started before it here and still go on; on a TPU for all
        that this user has on this machine. A run that is `detached` waits for those on a TPU
        only. It outlives this process and takes the supervisor with it: it is followed as
        others follow it.
        """
        known = self._replicate.get(_prelude(script))
        if spec.replicate is None and known is not None:
            spec = replace(spec, replicate=known)
        supervisor = self.warm(env)
        # It ends with the detached run: one that is lent is for the kernels after this one.
        if detached and (supervisor.busy or isinstance(supervisor, BorrowedSupervisor)):
            supervisor = SupervisorProcess(environment.fork_server_environment(env))
        supervisor.poll()
        spec = replace(spec, warm=supervisor.ready)
        write_folder(folder, spec, script, snapshot, env)
        if spec.replicate is not None:
            folder.emit(Note(f"every rank runs the prelude itself: {spec.replicate}"))
        variables = {**env, **restored}
        supervisor.run(folder.path, variables, device=DEVICES[spec.device], detached=detached)
        if not detached:
            return Run(folder, spec, supervisor)
        if supervisor is self.supervisor:
            self.supervisor = None
        supervisor.detach()
        self.warm(env)
        return Attached(folder)

    def start_at(
        self,
        target: Target,
        folder: RunDir,
        spec: RunSpec,
        script: Script,
        snapshot: Snapshot,
        env: Mapping[str, str],
        *,
        detached: bool = False,
    ) -> Run | Attached:
        """The same at a place: a mirror keeps the run's folder here as what its hosts have.

        `env` are variables for the ranks beside those that their hosts have. What cannot be
        stopped there is detached, whatever is asked for.
        """
        from tpunb.places.mirror import MirrorProcess

        write_folder(folder, spec, script, snapshot, env)
        for run in handed.runs_read(script.text):
            given.give(RunDir(run), folder)
        placed = target.placed(folder.id, detached=detached)
        placed.write(folder)
        mirror = MirrorProcess(folder, variables=env, stays=placed.detached)
        if placed.detached:
            return Attached(folder)
        self._mirrors = [each for each in self._mirrors if not each.has_exited()]
        self._mirrors.append(mirror)
        return Run(folder, spec, mirror)

    def run_ahead(
        self,
        spec: RunSpec,
        script: Script,
        env: Mapping[str, str],
        restored: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Run only the prelude, for later runs to begin in it. Nothing while a run goes on."""
        supervisor = self.warm(env)
        supervisor.poll()
        if supervisor.busy or _prelude(script) in self._replicate:
            return
        folder = RunDir(tempfile.mkdtemp(prefix="tpunb-ahead-"))
        folder.script.write_text(script.text, encoding="utf-8")
        folder.write_spec(spec)
        supervisor.run_ahead(folder.path, {**env, **restored})

    def remember(self, script: Script, result: RunResult, spec: RunSpec) -> None:
        """A prelude that could not be followed by a fork goes to replicate directly next time."""
        if result.replicated and spec.replicate is None:
            self._replicate[_prelude(script)] = result.replicate_reason


def write_folder(
    folder: RunDir, spec: RunSpec, script: Script, snapshot: Snapshot, env: Mapping[str, str]
) -> None:
    """Write everything that is known about a run into its folder."""
    folder.script.touch(0o600)
    folder.script.write_text(script.text, encoding="utf-8")
    files.write_json(folder.snapshot, asdict(snapshot))
    files.write_json(folder.env, environment.without_secrets(env))
    folder.write_spec(spec)


def _prelude(script: Script) -> str:
    return "".join(script.source(block) for block in script.blocks if block.role == "prelude")


def fingerprint_of(env: Mapping[str, str]) -> str:
    """What a fork server cannot change any more: interpreter, packages, variables."""
    packages = [
        _installed(folder, Path(folder).stat().st_mtime_ns)
        for folder in sys.path
        if Path(folder).name in ("site-packages", "dist-packages") and Path(folder).is_dir()
    ]
    return json.dumps([sys.executable, packages, environment.read_at_import(env)], sort_keys=True)


@lru_cache(maxsize=64)
def _installed(folder: str, changed: int) -> list[tuple[str, int]]:
    """What is installed in a folder, with times; `changed`: that of the folder, in nanoseconds.

    It tells when to look again, and no more: each first import of a module there changes it too
    (__pycache__).
    """
    return sorted(
        (entry.path, entry.stat().st_mtime_ns)
        for entry in os.scandir(folder)
        if entry.name.endswith((".dist-info", ".egg-info", ".pth"))
    )
