"""Starts runs and follows them to their end. One Launcher for a kernel; it keeps a guard warm."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tpunb import rundir
from tpunb.events import Ended, Event, Note
from tpunb.models import Failure, RunResult, RunSpec, Script, Snapshot
from tpunb.platforms import environment
from tpunb.process import GuardProcess
from tpunb.rundir import Follower, RunDir

LOOK = 0.04
"""Seconds between two looks into the run folder: quick to the eye, and cheap."""


class Run:
    """A run that was started: follow it with `events`, end it with `stop`."""

    def __init__(self, folder: RunDir, spec: RunSpec, guard: GuardProcess) -> None:
        self.dir = folder
        self.spec = spec
        self._guard = guard

    def events(self) -> Iterator[Event | None]:
        """What happens, as it happens, until no process is left; None whenever nothing did."""
        follower = Follower(self.dir, self.spec.world_size)
        while True:
            self._guard.hear()
            # Asked before the files are read: what a guard wrote last is then read below.
            lost = bool(self._guard.broken) and not self._guard.busy
            for event in follower.read():
                yield event
                if isinstance(event, Ended):
                    follower.close()
                    return
            if lost and not self.dir.result.exists():
                self._write_lost()
                continue
            yield None
            time.sleep(LOOK)

    def stop(self, why: str, reason: str, *, now: bool = False) -> None:
        """Begin the stop ladder; with `now`, skip what is left of the grace period."""
        self._guard.stop(why, reason, now=now)

    def result(self) -> RunResult:
        """How it ended. Only after `events` has come to its end."""
        result = self.dir.read_result()
        assert result is not None
        return result

    def _write_lost(self) -> None:
        """The guard is gone without a result, so nobody else can write one any more."""
        now = time.time()
        failure = Failure(
            rank=None, pid=self._guard.pid, exitcode=None, signal=None, type="Exit",
            message=self._guard.broken, cell=None, line=None, traceback="", time=now,
        )  # fmt: skip
        self.dir.write_result(
            RunResult(
                state="failed",
                name=self.spec.name,
                world_size=self.spec.world_size,
                device=self.spec.device,
                started=self.dir.spec.stat().st_mtime,
                ended=now,
                dir=self.dir.path,
                returncode=1,
                failures=(failure,),
                warm=self.spec.warm,
                replicated=self.spec.replicate is not None,
                replicate_reason=self.spec.replicate or "",
            )
        )
        self.dir.emit(Ended("failed"))


class Launcher:
    """Runs one notebook's train cells, one at a time, on a guard that is kept for the next."""

    def __init__(self) -> None:
        self._guard: GuardProcess | None = None
        self._key: object = None
        self._replicate: dict[str, str] = {}

    def warm(self, env: Mapping[str, str]) -> GuardProcess:
        """A guard whose agent fits this run environment; started now if there is none.

        One that was started for another interpreter, other packages or other variables that
        are read at import is closed first.
        """
        key = _fingerprint(env)
        guard = self._guard
        if guard is not None:
            guard.hear()
            if guard.broken or key != self._key:
                self.close()
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

    def close(self) -> None:
        """End the guard and all below it."""
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def start(
        self, folder: RunDir, spec: RunSpec, script: Script, snapshot: Snapshot,
        env: Mapping[str, str],
    ) -> Run:  # fmt: skip
        """Write everything that is known about a run into its folder, and start it."""
        known = self._replicate.get(_prelude(script))
        if spec.replicate is None and known is not None:
            spec = replace(spec, replicate=known)
        guard = self.warm(env)
        guard.hear()
        spec = replace(spec, warm=guard.ready)
        folder.script.write_text(script.text, encoding="utf-8")
        rundir.write_json(folder.snapshot, asdict(snapshot))
        rundir.write_json(folder.env, environment.without_secrets(env))
        rundir.write_json(folder.spec, spec.to_json())
        if spec.replicate is not None:
            folder.emit(Note(f"every rank runs the prelude itself: {spec.replicate}"))
        guard.run(folder.path, dict(env))
        return Run(folder, spec, guard)

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
