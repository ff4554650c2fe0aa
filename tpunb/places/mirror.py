"""The process that keeps a run's folder here as the union of its hosts' folders.

    kernel ── stdin pipe: the lifeline ──> mirror ── ssh, one for each host ──> tpunb node

It starts the run, or finds one that goes on, and holds the folder's lock until it has ended: so
whatever reads run folders, asks for stops or waits for ends does it here as for any other run. When
the lifeline closes it closes those of the hosts, unless the run is detached: then it stays, and
when it is gone itself, `ensure` starts another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpunb.places.errors import HostsError, list_hosts
from tpunb.places.kinds import open_place
from tpunb.places.merge import Merge
from tpunb.places.place import Cancelled, HostGone, Place, Restarted, Said
from tpunb.runs import state, stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Note, Phase, RanksStarted
from tpunb.runs.result import Failure, RunResult, signal_name
from tpunb.runs.spec import FailureKind, PhaseKind, RunSpec, RunState, StopCause, StopOrigin
from tpunb.runs.spec import Stop as StopReason
from tpunb.runs.stream import Append, End, Hello, Replace, Stop
from tpunb.utils import files, interrupts, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineTail

LOG = "mirror.log"
SAVE = 1.0
"""Seconds between two notes of how much is here."""
_TAIL = 3000
"""Bytes that are shown of what a mirror has written before it failed."""
FIRST_LOOK = 15.0
"""Seconds that who asks for a run elsewhere waits until its hosts have answered."""
_MIRROR = "from tpunb.places import mirror; mirror.main()"


class MirrorProcess:
    """The kernel's end of a mirror: the run goes on as long as its lifeline is open."""

    def __init__(self, run: RunDir, *, variables: Mapping[str, str] | None, stays: bool) -> None:
        """`variables`: of the ranks, of a run that is to start; None for one that is found.

        `stays`: it outlives this process.
        """
        self.run = run
        with open(run.path / LOG, "ab", opener=_private) as log:
            self._process = interrupts.start_apart(
                _MIRROR,
                str(run.path),
                "stays" * stays,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        _connected.add(self)
        assert self._process.stdin is not None
        order = None if variables is None else dict(variables)
        with contextlib.suppress(BrokenPipeError):  # it has ended: its log says why
            self._process.stdin.write((json.dumps({"variables": order}) + "\n").encode())
            self._process.stdin.flush()
        if stays:
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_exited(self) -> bool:
        """Whether nothing will be written into the run's folder any more."""
        return self._process.poll() is not None

    def has_finished(self, folder: Path) -> bool:
        """The same, of its run."""
        return self.has_exited()

    @property
    def broken(self) -> str:
        """How it was killed, or what it has said where it should say nothing; '' if neither."""
        ended = self._process.poll() or 0
        if ended < 0:
            return (
                f"the process that follows the run was killed ({signal_name(-ended)}); "
                "`tpunb attach` follows it again"
            )
        with contextlib.suppress(OSError):
            return files.read_end(self.run.path / LOG, _TAIL).decode("utf-8", "replace").strip()
        return ""

    def stop(
        self,
        folder: Path,
        cause: StopCause,
        reason: str,
        *,
        origin: StopOrigin | None = None,
        now: bool = False,
    ) -> None:
        """Begin the shutdown sequence of the run; `now` skips what is left of the grace period."""
        state.request_stop(self.run, reason, origin=origin, now=now)

    def close_pipes(self) -> None:
        """Close the lifeline."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    begin_close = close_pipes

    def close(self, wait: float = 60.0) -> None:
        """Close the lifeline, and wait until the run has ended on all hosts."""
        self.close_pipes()
        self._process.wait(wait)


_connected: weakref.WeakSet[MirrorProcess] = weakref.WeakSet()


def _close_in_child() -> None:
    """In a process that the kernel forks: the lifeline is the kernel's alone."""
    for mirror in _connected:
        mirror.close_pipes()


os.register_at_fork(after_in_child=_close_in_child)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def ensure(*runs: RunDir) -> None:
    """Have runs that are elsewhere followed, if nobody does; waits until their hosts have answered.

    Nothing for runs on this machine, followed already, or ended.
    """
    started = []
    for run in runs:
        if run.is_away() and not run.is_running() and state.read_result(run) is None:
            with contextlib.suppress(FileNotFoundError):
                (run.path / _SYNCED).unlink()
            started.append(MirrorProcess(run, variables=None, stays=True))
    deadline = time.monotonic() + FIRST_LOOK
    while time.monotonic() < deadline and not all(
        (mirror.has_exited() and not mirror.run.is_running())
        or (mirror.run.path / _SYNCED).exists()
        for mirror in started
    ):
        time.sleep(0.05)


_SYNCED = "synced"
"""Exists once the hosts of a run that was found again have said what was not here."""


class Mirror:
    """Follows one run until it has ended on all hosts."""

    def __init__(self, run: RunDir, place: Place, *, stays: bool, again: bool) -> None:
        """`again`: the run was started before, and is found."""
        self.run = run
        self.spec: RunSpec = run.read_spec()
        self.place = place
        self.stays = stays
        self._merge = Merge(run, self.spec, place.placed.skews, again=again)
        self._requests = LineTail(run.requests)
        self._started = time.time()
        self._stop: Stop | None = None
        self._gone: dict[int, str] = {}
        """Hosts whose connection has ended too early, and why."""
        self._refused: dict[int, str] = {}
        """Hosts that have started nothing, and why."""
        self._missing: set[int] = set()
        """Hosts that are to start the run, and have not answered."""
        self._ended: set[int] = set()
        self._lifeline = not stays
        """Whether there is one, and it is open."""
        self._quiet_since = time.monotonic()

    # Requests

    def _look_for_stops(self) -> Iterator[Stop]:
        """The stops that were asked for since the last call."""
        for line in self._requests.read():
            with contextlib.suppress(ValueError):
                request: Any = records.parse(line)
                if isinstance(request, dict) and request.get("do") == "stop":
                    origin = request.get("origin")
                    yield Stop(
                        StopCause.USER,
                        str(request.get("reason", "")),
                        StopOrigin(origin) if origin else None,
                        now=bool(request.get("now")),
                    )
        if self._lifeline and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            self._lifeline = False
            yield Stop(StopCause.KERNEL_GONE, "the kernel has ended")

    def _cancelled(self) -> bool:
        """Whether a stop was asked for before the run has begun."""
        for request in self._look_for_stops():
            self._stop = self._stop or request
        return self._stop is not None

    def _pass_on_stops(self) -> None:
        for request in self._look_for_stops():
            if not self.place.placed.cannot_stop:
                self._stop = self._stop or request
            self.place.stop(request)
            if request.cause is StopCause.KERNEL_GONE:
                self.place.let_go()

    # The run

    def begin(self, variables: Mapping[str, str]) -> bool:
        """Start it; False if that failed or was given up, which its result says."""
        self.run.emit(Phase(PhaseKind.STARTING, "starting"))

        def say(text: str) -> None:
            self.run.emit(Phase(PhaseKind.STARTING, text))

        try:
            self.place.start(variables, say, self._cancelled)
        except Cancelled:
            self._finish_without_hosts(())
            return False
        except (TpunbError, OSError) as error:
            problems = error.problems if isinstance(error, HostsError) else ((None, str(error)),)
            failures = tuple(_failure(FailureKind.REFUSED, what, host) for host, what in problems)
            self._finish_without_hosts(failures)
            return False
        self._missing = set(range(len(self.spec.hosts)))
        self._say_missing()
        return True

    def _say_missing(self) -> None:
        """Which hosts the start waits for. What host 0 has said since of itself stands."""
        names = list_hosts([self.spec.hosts[host] for host in sorted(self._missing)])
        text = f"starting, waiting for {names}" if names else "starting"
        if self._merge.phase is not PhaseKind.QUEUED:
            self.run.emit(Phase(PhaseKind.STARTING, text))

    def follow(self) -> None:
        """Until it has ended on all hosts, and its result is here."""
        saved = time.monotonic()
        for said in self.place.follow(self._merge.offsets):
            self._pass_on_stops()
            now = time.time()
            if said is None:
                self._note_synced()
            else:
                self._quiet_since = time.monotonic()
                self._take_in(said, now)
            self._merge.flush(now)
            if time.monotonic() - saved >= SAVE:
                saved = time.monotonic()
                self._merge.save_offsets()
        self._merge.flush(float("inf"))
        self._merge.save_offsets()
        self._finish()

    def _note_synced(self) -> None:
        """Hosts that say nothing for a while have said everything that was not here."""
        if self.stays and time.monotonic() - self._quiet_since > 1.0:
            with contextlib.suppress(OSError):
                (self.run.path / _SYNCED).touch()

    def _take_in(self, said: Said, now: float) -> None:
        host, name = said.host, self.spec.hosts[said.host]
        match said.line:
            case Append() | Replace() as line:
                self._merge.add(host, line, now)
            case Hello():
                self._gone.pop(host, None)
                if host in self._missing:
                    self._missing.remove(host)
                    self._say_missing()
            case End(returncode, message):
                self._ended.add(host)
                if message and returncode:
                    self._refused[host] = message
                    self._stop_others(f"{name}: {message}")
            case Restarted():
                self._merge.restart()
                self._ended.clear()
                self._gone.clear()
                self._refused.clear()
            case HostGone(reason, final):
                self._gone[host] = reason
                if final:
                    self._ended.add(host)
                text = f"the connection to {name} has ended: {reason}"
                self.run.emit(Note(text))
                if not self.place.placed.detached:
                    self._stop_others(text)

    def _stop_others(self, reason: str) -> None:
        """No host waits for one that does not take part any more."""
        self.place.stop(Stop(StopCause.HOST_LOST, reason))

    # The end

    def _finish(self) -> None:
        if self.place.placed.detached and not self._ended:
            return  # it may go on: nobody could be asked
        result = self._whole_result()
        if self.spec.returns and 0 not in self._gone:
            self._fetch_returns()
        if self.spec.profile is not None:
            self._fetch_trace()
        self.place.finish(lambda text: self.run.emit(Note(text)))
        problem = self._merge.problem
        if problem:
            self.run.emit(Note(f"this copy of the run is not complete: {problem}"))
        self._write(result)

    def _fetch_returns(self) -> None:
        """The values of `--returns`, which rank 0 has written on host 0."""
        try:
            self.place.fetch([self.run.returns.name], self.run.path, hosts=[0])
        except (TpunbError, OSError, ValueError) as error:
            self.run.emit(Note(f"the values of --returns have not come: {error}"))

    def _fetch_trace(self) -> None:
        """Of `--profile`: all ranks' parts, which are one trace only if they are together."""
        here = [host for host in range(len(self.spec.hosts)) if host not in self._gone]
        try:
            self.place.fetch([stream.PROFILE], self.run.path, hosts=here)
        except (TpunbError, OSError, ValueError) as error:
            self.run.emit(Note(f"the trace of --profile has not come: {error}"))

    def _whole_result(self) -> RunResult:
        """That of host 0, or, if it is lost, what the others and the connections say."""
        found = [self._read_result(host) for host in range(len(self.spec.hosts))]
        whole = next((result for result in found if result is not None), None)
        names = self.spec.hosts
        lost = tuple(
            _failure(FailureKind.HOST_LOST, f"{names[host]} was lost: {reason}", names[host])
            for host, reason in self._gone.items()
        )
        refused = tuple(
            _failure(FailureKind.REFUSED, f"{names[host]}: {reason}", names[host])
            for host, reason in self._refused.items()
        )
        if whole is None:
            return self._made((*refused, *lost))
        whole = replace(whole, hosts=self.spec.hosts, place=self.spec.place, dir=self.run.path)
        if earlier := self._merge.first_attempt:
            # What the hosts know began with their last start.
            started = (e.time for e in self.run.read_events() if isinstance(e, RanksStarted))
            whole = replace(
                whole,
                attempts=whole.attempts + earlier,
                started=min(next(started, whole.started), whole.started),
            )
        known = {failure.host for failure in whole.failures}
        more = tuple(each for each in (*refused, *lost) if each.host not in known)
        if found[0] is None and not self._gone_by_request() and more:
            return replace(whole, state=RunState.FAILED, failures=(*more, *whole.failures))
        return whole

    def _gone_by_request(self) -> bool:
        return self._stop is not None

    def _read_result(self, host: int) -> RunResult | None:
        try:
            return RunResult.from_json(records.read(self._merge.result_of(host)), self.run.path)
        except (OSError, ValueError):
            return None

    def _finish_without_hosts(self, failures: tuple[Failure, ...]) -> None:
        """Of a run that no host has begun."""
        self._write(replace(self._made(failures), price=None))

    def _made(self, failures: tuple[Failure, ...]) -> RunResult:
        """A result that no host has written."""
        stop = self._stop
        return RunResult(
            state=RunState.FAILED if failures or stop is None else RunState.INTERRUPTED,
            name=self.spec.name,
            world_size=self.spec.world_size,
            device=self.spec.device,
            started=self._started,
            ended=time.time(),
            dir=self.run.path,
            returncode=1,
            failures=failures,
            reason="" if stop is None else stop.reason,
            stop=None if stop is None else StopReason(stop.cause, stop.origin),
            spmd=self.spec.spmd,
            resumed_from=self.spec.resumed_from,
            price=None if self._merge.phase is None else self.spec.price,
            hosts=self.spec.hosts,
            place=self.spec.place,
        )

    def _write(self, result: RunResult) -> None:
        with contextlib.suppress(OSError):
            self.run.write_result(result)
        self.run.emit(Phase(PhaseKind.ENDED, result.state))
        self.run.emit(Ended(result.state))


def _failure(kind: FailureKind, message: str, host: str | None) -> Failure:
    return Failure(
        rank=None,
        pid=None,
        exitcode=None,
        signal=None,
        type="Lost" if kind is FailureKind.HOST_LOST else "Refused",
        message=message,
        cell=None,
        line=None,
        traceback="",
        time=time.time(),
        kind=kind,
        host=host,
    )


def main() -> None:
    """Run a mirror: `sys.argv` has the run's folder and 'stays' or ''."""
    run, stays = RunDir(sys.argv[1]), bool(sys.argv[2])
    # Not ignored: what this starts would inherit that, and could not be interrupted either.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    os.umask(0o077)
    order = json.loads(_first_line())
    again = order["variables"] is None
    if again and run.is_running():
        return  # another command's was quicker
    lock = run.take_lock()
    if again and state.read_result(run) is not None:
        return
    try:
        place = open_place(run)
    except TpunbError as error:
        run.emit(Note(str(error)))
        print(error, file=sys.stderr)
        return
    mirror = Mirror(run, place, stays=stays, again=again)
    try:
        if again or mirror.begin(order["variables"]):
            mirror.follow()
    finally:
        mirror.place.close()
        if lock is not None:
            lock.close()


def _first_line() -> bytes:
    """The first line of standard input, and not a byte more."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            break
        line += part
    return bytes(line)
