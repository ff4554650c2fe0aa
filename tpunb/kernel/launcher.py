"""Starts runs and follows them to their end, with a fork server kept ready for the next one."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tpunb.kernel.supervisor import SupervisorProcess
from tpunb.machine import environment
from tpunb.notebook.convert import earlier_values
from tpunb.notebook.models import Script, Snapshot
from tpunb.runs import copied_values, state, summary
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Event, Note
from tpunb.runs.follow import POLL_INTERVAL, follow_run
from tpunb.runs.ownership import HeldFolder
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import Device, FailureKind, RunSpec, RunState, Stop
from tpunb.utils import files, processes
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    from tpunb.kernel.pipeline import RunRequest

DEVICES: dict[Device, str | None] = {"TPU": "tpu", "CPU": None, "GPU": None}
"""Name of the lock of each kind of device that only one run of a user can use at a time."""


class Run:
    """A run that was started: follow it with `events`, end it with `stop`."""

    def __init__(self, folder: RunDir, spec: RunSpec, supervisor: SupervisorProcess) -> None:
        self.dir = folder
        self.spec = spec
        self._supervisor = supervisor
        self._started = time.time()

    def events(self) -> Iterator[Event | None]:
        """Yield the run's events until no process is left, and None whenever nothing happens."""
        finished = partial(self._supervisor.has_finished, self.dir.path)
        stopped = False
        for event in follow_run(self.dir, self.spec, finished):
            yield event
            if event is None and not stopped:
                pid = self._supervisor.pid
                found = processes.find_process(pid)
                stopped = found is not None and processes.process_state(found) == "T"
                if stopped:
                    yield Note(f"process {pid}, which runs it, is stopped: kill -CONT {pid}")
        while not finished():  # the message comes right after the last event
            time.sleep(POLL_INTERVAL / 10)

    def stop(self, stop: Stop) -> None:
        """Begin the shutdown sequence, or continue it without a grace period."""
        self._supervisor.stop(self.dir.path, stop)

    def result(self) -> RunResult:
        """Return the result, with the causes of a failure. Call it after `events` has ended."""
        result = state.read_result(self.dir)
        return explained(self._lost() if result is None else result)

    def _lost(self) -> RunResult:
        """Write and return the result of a run whose supervisor has ended without writing one."""
        message = self._supervisor.broken
        if not self.dir.path.exists():
            message = f"{self.dir.path} was deleted during the run, so its result is unknown"
        elif self.dir.held is not None and self.dir.held.is_replaced():
            message = (
                f"{self.dir.path} is not the folder that the run started in: it was replaced "
                "during the run, so nothing is read from it"
            )
        elif not message:
            message = f"the result could not be written to {self.dir.path}; is its disk full?"
        failure = Failure.of(FailureKind.LOST, message, pid=self._supervisor.pid)
        result = RunResult.of_spec(
            self.spec,
            self.dir.path,
            RunState.FAILED,
            self._started,
            failure.time,
            returncode=1,
            failures=(failure,),
            replicated=self.spec.replicate is not None,
            replicate_reason=self.spec.replicate or "",
        )
        with contextlib.suppress(OSError):
            self.dir.write_result(result)
            self.dir.emit(Ended(RunState.FAILED))
        return result


class Attached:
    """A run that this process does not own, followed through its folder."""

    def __init__(self, folder: RunDir) -> None:
        self.dir = folder
        self.spec = state.read_spec(folder)
        if folder.held is None:
            folder.held = HeldFolder(folder.path)

    def events(self) -> Iterator[Event | None]:
        """Yield all events from the run's start until it has ended."""
        return follow_run(self.dir, self.spec, self._gone, attached=True)

    def stop(self, stop: Stop) -> None:
        """Request a stop in the run's folder."""
        state.request_stop(self.dir, stop)

    def _gone(self) -> bool:
        return not state.run_state(self.dir).active

    def result(self) -> RunResult:
        """Return the result, after `events` has ended. Raises TpunbError if the run is lost."""
        result = state.read_result(self.dir)
        if result is None:
            raise TpunbError(state.lost_message(self.dir))
        return explained(result)


class ShownRun(Protocol):
    """What shows a run: `tick` is called whenever nothing has happened."""

    def show(self, event: Event) -> None: ...

    def tick(self) -> None: ...


def show_events(run: Run | Attached, *shown: ShownRun) -> Iterator[None]:
    """Show a run until it has ended; yield after each event or pause."""
    for event in run.events():
        for each in shown:
            each.tick() if event is None else each.show(event)
        yield


def explained(result: RunResult) -> RunResult:
    """Return the result with its summary and, if the run failed, the causes found in its log."""
    result = replace(result, summary=summary.summarize(result))
    if result.state not in (RunState.FAILED, RunState.HUNG):
        return result
    # Imported late: the rules are read only when needed.
    from tpunb.diagnostics.failure.run import diagnose_run

    return replace(result, diagnoses=tuple(diagnose_run(result)))


class Launcher:
    """Starts the runs of one kernel, one at a time, with a supervisor that is kept for the next."""

    def __init__(self) -> None:
        self.supervisor: SupervisorProcess | None = None
        """The supervisor for the next run."""
        self._retired: list[SupervisorProcess] = []
        """Supervisors that no later run can use, but that have a run."""
        self._fingerprint: object = None
        self._replicate: dict[str, str] = {}

    def warm(self, env: Mapping[str, str]) -> SupervisorProcess:
        """Return a supervisor whose fork server fits this environment; start it if necessary.

        A supervisor with another interpreter, other packages or other variables that are read at
        import is retired first.
        """
        fingerprint = fingerprint_of(env)
        supervisor = self.supervisor
        if supervisor is not None:
            supervisor.poll()
            if supervisor.broken or fingerprint != self._fingerprint:
                self.retire()
                supervisor = None
        if supervisor is None:
            supervisor = SupervisorProcess(environment.fork_server_environment(env))
            self.supervisor, self._fingerprint = supervisor, fingerprint
        return supervisor

    @property
    def is_warm(self) -> bool:
        """True if a fork server has imported everything and waits."""
        if self.supervisor is not None:
            self.supervisor.poll()
        return self.supervisor is not None and self.supervisor.ready

    def retire(self) -> None:
        """End the supervisor and all its processes, once its background runs have ended."""
        supervisor, self.supervisor = self.supervisor, None
        if supervisor is not None:
            self._retired.append(supervisor)
        self._close_idle()

    def _close_idle(self) -> None:
        for supervisor in list(self._retired):
            supervisor.poll()
            if not supervisor.busy:
                supervisor.close()
                self._retired.remove(supervisor)

    def close(self, wait: float = 60.0) -> None:
        """End every supervisor and all runs, even background runs, with time to save."""
        supervisors = [*self._retired, *([] if self.supervisor is None else [self.supervisor])]
        self._retired, self.supervisor = [], None
        for each in supervisors:
            each.begin_close()
        for each in supervisors:
            each.close(wait)

    def begin(
        self, request: RunRequest, folder: RunDir, spec: RunSpec, snapshot: Snapshot
    ) -> Run | Attached:
        """Write a run's script, spec and notebook into its folder, and start the run."""
        if request.target.hosts:
            return self._begin_at(request, folder, spec, snapshot)
        script, detached = request.notebook.script, request.options.detach
        restored = request.restored
        return self.start(
            folder, spec, script, snapshot, request.env, restored=restored, detached=detached
        )

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
        """Start a run on this machine.

        `restored` are the values of `spec.restored`, which are in no file: they may be secrets.

        The run waits for earlier runs of this kernel that are still running; on a TPU, for all
        runs of this user on this machine. A `detached` run waits on a TPU only. It outlives this
        process and takes the supervisor with it; this process follows it through its folder.
        """
        known = self._replicate.get(_prelude(script))
        if spec.replicate is None and known is not None:
            spec = replace(spec, replicate=known)
        supervisor = self.warm(env)
        if detached and supervisor.busy:  # a detached run ends its supervisor
            supervisor = SupervisorProcess(environment.fork_server_environment(env))
        supervisor.poll()
        spec = replace(spec, warm=supervisor.ready)
        write_folder(folder, spec, script, snapshot, env)
        variables = {**env, **restored}
        supervisor.run(folder.path, variables, device=DEVICES[spec.device], detached=detached)
        if not detached:
            return Run(folder, spec, supervisor)
        if supervisor is self.supervisor:
            self.supervisor = None
        supervisor.detach()
        self.warm(env)
        return Attached(folder)

    def _begin_at(
        self, request: RunRequest, folder: RunDir, spec: RunSpec, snapshot: Snapshot
    ) -> Run | Attached:
        """Start a run on the hosts of a place, with a supervisor of its own."""
        from tpunb.places.hosts_target import HostsTarget

        target, script = request.target, request.notebook.script
        detached, env = request.options.detach, request.remote_env(folder.id)
        assert isinstance(target, HostsTarget)
        write_folder(folder, spec, script, snapshot, env)
        for run in earlier_values.runs_read(script.text):
            copied_values.copy_into(RunDir(run), folder)
        placed = target.placed(folder.id)
        placed.write(folder)
        supervisor = SupervisorProcess(None)
        pod = target.pod(folder, spec, placed, env)
        supervisor.run(folder.path, {}, detached=detached, pod=pod)
        if detached:
            supervisor.detach()
            return Attached(folder)
        self._close_idle()
        self._retired.append(supervisor)
        return Run(folder, spec, supervisor)

    def run_ahead(
        self,
        spec: RunSpec,
        script: Script,
        env: Mapping[str, str],
        restored: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Run only the prelude, from which later runs can start. Does nothing during a run."""
        supervisor = self.warm(env)
        supervisor.poll()
        if supervisor.busy or _prelude(script) in self._replicate:
            return
        folder = RunDir(tempfile.mkdtemp(prefix="tpunb-ahead-"))
        folder.script.write_text(script.text, encoding="utf-8")
        folder.write_spec(spec)
        supervisor.run_ahead(folder.path, {**env, **restored})

    def remember(self, script: Script, result: RunResult, spec: RunSpec) -> None:
        """If forking after the prelude failed, replicate it from the start next time."""
        if result.replicated and spec.replicate is None:
            self._replicate[_prelude(script)] = result.replicate_reason


def write_folder(
    folder: RunDir, spec: RunSpec, script: Script, snapshot: Snapshot, env: Mapping[str, str]
) -> None:
    """Write a run's script, notebook, environment and spec into its folder."""
    folder.script.touch(0o600)
    folder.script.write_text(script.text, encoding="utf-8")
    files.write_json(folder.snapshot, snapshot)
    files.write_json(folder.env, environment.without_secrets(env))
    folder.write_spec(spec)


def _prelude(script: Script) -> str:
    return "".join(script.source(block) for block in script.blocks if block.role == "prelude")


def fingerprint_of(env: Mapping[str, str]) -> str:
    """Return what a fork server cannot change after its start: interpreter, packages, variables."""
    packages = [
        _installed(folder, Path(folder).stat().st_mtime_ns)
        for folder in sys.path
        if Path(folder).name in ("site-packages", "dist-packages") and Path(folder).is_dir()
    ]
    return json.dumps([sys.executable, packages, environment.read_at_import(env)], sort_keys=True)


@lru_cache(maxsize=64)
def _installed(folder: str, changed: int) -> list[tuple[str, int]]:
    """Return the packages installed in a folder, with their modification times.

    `changed`, the folder's own in nanoseconds, is only the cache key: it also changes when a module
    of the folder is imported for the first time (__pycache__).
    """
    return sorted(
        (entry.path, entry.stat().st_mtime_ns)
        for entry in os.scandir(folder)
        if entry.name.endswith((".dist-info", ".egg-info", ".pth"))
    )
