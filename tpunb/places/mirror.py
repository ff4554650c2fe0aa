"""The process that keeps the local folder of a run as the union of its hosts' folders.

    kernel ── stdin pipe: the lifeline ──> mirror ── ssh, one for each host ──> tpunb node

The mirror starts the run, or finds one that is running, and holds the folder's lock until the run
has ended: whatever reads run folders, requests stops or waits for ends treats the run like any
other. When its lifeline closes, the mirror closes those of the hosts, unless the run is detached:
then the mirror stays, and if it is gone itself, `ensure` starts another one.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tpunb.places.errors import HostsError, PlaceError, list_hosts
from tpunb.places.kinds import open_place
from tpunb.places.merge import Merge
from tpunb.places.place import Cancelled, ConnectionLost, HostLine, Place
from tpunb.runs import state, stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Note, Phase
from tpunb.runs.result import Failure, RunResult, signal_name
from tpunb.runs.spec import FailureKind, PhaseKind, RunSpec, RunState, Stop, StopCause
from tpunb.runs.stream import Append, End, Hello, Replace
from tpunb.utils import files, interrupts, records
from tpunb.utils.errors import TpunbError
from tpunb.utils.files import LineTail

LOG = "mirror.log"
SAVE = 1.0
"""Seconds between two updates of the saved offsets."""
_TAIL = 3000
"""Bytes shown from the end of a failed mirror's log."""
FIRST_LOOK = 15.0
"""Seconds that `ensure` waits for the answers of a run's hosts."""
TAKEN = 120.0
"""Seconds that a new detached run has to reach its place before it is called not confirmed."""
_MIRROR = "from tpunb.places import mirror; mirror.main()"


class MirrorProcess:
    """The kernel's handle of a mirror: the run continues while its lifeline is open."""

    def __init__(self, run: RunDir, *, variables: Mapping[str, str] | None, stays: bool) -> None:
        """Start a mirror. `variables`: for the ranks of a new run; None to follow an existing run.

        `stays`: the mirror outlives this process.
        """
        self.run = run
        with open(run.path / LOG, "ab", opener=files.opener) as log:
            self._process = interrupts.start_in_own_session(
                _MIRROR,
                str(run.path),
                "stays" * stays,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )
        interrupts.close_in_children(self)
        assert self._process.stdin is not None
        order = None if variables is None else dict(variables)
        with contextlib.suppress(BrokenPipeError):  # it has ended: its log shows why
            self._process.stdin.write((json.dumps({"variables": order}) + "\n").encode())
            self._process.stdin.flush()
        if stays:
            self._process.stdin.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_exited(self) -> bool:
        """True if nothing more will be written into the run folder."""
        return self._process.poll() is not None

    def has_finished(self, folder: Path) -> bool:
        """True if the run's supervisor has finished: for a mirror, if it has exited."""
        return self.has_exited()

    @property
    def broken(self) -> str:
        """How the mirror was killed, or its unexpected output; '' if neither."""
        ended = self._process.poll() or 0
        if ended < 0:
            return (
                f"the process that follows the run was killed ({signal_name(-ended)}); "
                "`tpunb attach` follows it again"
            )
        with contextlib.suppress(OSError):
            return files.read_end(self.run.path / LOG, _TAIL).decode("utf-8", "replace").strip()
        return ""

    def stop(self, folder: Path, stop: Stop) -> None:
        """Begin the shutdown sequence of the run, or continue it without a grace period."""
        state.request_stop(self.run, stop)

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


def ensure(*runs: RunDir) -> None:
    """Start a mirror for each run at a place that has none; wait until its hosts have answered.

    Does nothing for runs on this machine, and for runs that are followed already or have ended.
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


def wait_until_taken(run: RunDir, given_up: Callable[[], bool]) -> None:
    """Wait until a place has confirmed that it has a new run, or the run has ended.

    Raises PlaceError if neither has happened in time, or when `given_up` returns True.
    """
    deadline = time.monotonic() + TAKEN
    while not run.taken.exists() and state.read_result(run) is None:
        if given_up() or time.monotonic() > deadline:
            raise PlaceError(
                f"run {run.id} was sent, but place {run.read_spec().place} has not confirmed that "
                f"it has the run: `tpunb attach {run.id}` follows it, `tpunb stop {run.id}` stops "
                "it"
            )
        time.sleep(0.05)


_SYNCED = "synced"
"""File that exists once the hosts of a run that was found again have sent what was missing."""


class Mirror:
    """Follows one run until it has ended on all hosts."""

    def __init__(self, run: RunDir, place: Place, *, stays: bool, again: bool) -> None:
        """`again`: the run was started before, and is followed again."""
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
        """Hosts that have refused to start the run, and why."""
        self._missing: set[int] = set()
        """Hosts that have not answered to the start of the run."""
        self._ended: set[int] = set()
        self._lifeline = not stays
        """True while the mirror has an open lifeline."""
        self._quiet_since = time.monotonic()

    # Requests

    def _look_for_stops(self) -> Iterator[Stop]:
        """Yield the stops requested since the last call."""
        yield from state.read_stops(self._requests)
        if self._lifeline and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            self._lifeline = False
            yield Stop(StopCause.KERNEL_GONE, "the kernel has ended")

    def _cancelled(self) -> bool:
        """True if a stop was requested before the run has begun."""
        for request in self._look_for_stops():
            self._stop = self._stop or request
        return self._stop is not None

    def _pass_on_stops(self) -> None:
        for request in self._look_for_stops():
            self._stop = self._stop or request
            self.place.stop(request)
            if request.cause is StopCause.KERNEL_GONE:
                self.place.release_lifelines()

    # The run

    def begin(self, variables: Mapping[str, str]) -> bool:
        """Start the run; if that fails or is cancelled, write its result and return False."""
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
            refused = FailureKind.REFUSED
            failures = tuple(Failure.of(refused, what, host=host) for host, what in problems)
            self._finish_without_hosts(failures)
            return False
        self._missing = set(range(len(self.spec.hosts)))
        self._say_missing()
        return True

    def _say_missing(self) -> None:
        """Report which hosts the start waits for, unless host 0 has reported a queue since."""
        names = list_hosts([self.spec.hosts[host] for host in sorted(self._missing)])
        text = f"starting, waiting for {names}" if names else "starting"
        if self._merge.phase is not PhaseKind.QUEUED:
            self.run.emit(Phase(PhaseKind.STARTING, text))

    def follow(self) -> None:
        """Follow the run until it has ended on all hosts and its result is written."""
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
        """Mark the folder as synced after a second without messages."""
        if self.stays and time.monotonic() - self._quiet_since > 1.0:
            with contextlib.suppress(OSError):
                (self.run.path / _SYNCED).touch()

    def _take_in(self, said: HostLine, now: float) -> None:
        host, name = said.host, self.spec.hosts[said.host]
        match said.line:
            case Append() | Replace() as line:
                self._merge.add(host, line, now)
            case Hello():
                self._gone.pop(host, None)
                if host in self._missing:
                    self._missing.remove(host)
                    self._say_missing()
                    if not self._missing:
                        self.place.note_taken()
            case End(returncode, message):
                self._ended.add(host)
                if message and returncode:
                    self._refused[host] = message
                    self._stop_others(f"{name}: {message}")
            case ConnectionLost(reason):
                self._gone[host] = reason
                text = f"lost the connection to {name}: {reason}"
                self.run.emit(Note(text))
                if not self.place.placed.detached:
                    self._stop_others(text)

    def _stop_others(self, reason: str) -> None:
        """Stop all hosts, so that none waits for a host that no longer takes part."""
        self.place.stop(Stop(StopCause.HOST_LOST, reason))

    # The end

    def _finish(self) -> None:
        if self.place.placed.detached and not self._ended:
            return  # the run may still be running: no host could be reached
        result = self._whole_result()
        here = [host for host in range(len(self.spec.hosts)) if host not in self._gone]
        if self.spec.returns and 0 in here:  # rank 0 has written them
            self._fetch(self.run.returns.name, "the values of --returns", [0])
        if self.spec.profile is not None:  # the ranks' parts are useful only together
            self._fetch(stream.PROFILE, "the trace of --profile", here)
        problem = self._merge.problem
        if problem:
            self.run.emit(Note(f"the copy of the run on this machine is incomplete: {problem}"))
        self._write(result)

    def _fetch(self, name: str, what: str, hosts: list[int]) -> None:
        try:
            self.place.fetch([name], self.run.path, hosts=hosts)
        except (TpunbError, OSError, ValueError) as error:
            self.run.emit(Note(f"{what} could not be fetched: {error}"))

    def _whole_result(self) -> RunResult:
        """The result of host 0 or, if that is lost, of another host, with lost hosts' failures."""
        found = [self._read_result(host) for host in range(len(self.spec.hosts))]
        whole = next((result for result in found if result is not None), None)
        names = self.spec.hosts
        lost = tuple(
            Failure.of(FailureKind.HOST_LOST, f"{names[host]} was lost: {reason}", host=names[host])
            for host, reason in self._gone.items()
        )
        refused = tuple(
            Failure.of(FailureKind.REFUSED, f"{names[host]}: {reason}", host=names[host])
            for host, reason in self._refused.items()
        )
        if whole is None:
            return self._made((*refused, *lost))
        whole = replace(whole, hosts=self.spec.hosts, place=self.spec.place, dir=self.run.path)
        known = {failure.host for failure in whole.failures}
        more = tuple(each for each in (*refused, *lost) if each.host not in known)
        if found[0] is None and self._stop is None and more:
            return replace(whole, state=RunState.FAILED, failures=(*more, *whole.failures))
        return whole

    def _read_result(self, host: int) -> RunResult | None:
        try:
            return RunResult.from_json(records.read(self._merge.result_of(host)), self.run.path)
        except (OSError, ValueError):
            return None

    def _finish_without_hosts(self, failures: tuple[Failure, ...]) -> None:
        """Write the result of a run that no host has begun."""
        self._write(replace(self._made(failures), price=None))

    def _made(self, failures: tuple[Failure, ...]) -> RunResult:
        """A result made by the mirror, because no host has written one."""
        stop = self._stop
        return RunResult.of_spec(
            self.spec,
            self.run.path,
            RunState.FAILED if failures or stop is None else RunState.INTERRUPTED,
            self._started,
            time.time(),
            returncode=1,
            failures=failures,
            reason="" if stop is None else stop.reason,
            stop=None if stop is None else stop.without_reason(),
            price=None if self._merge.phase is None else self.spec.price,
        )

    def _write(self, result: RunResult) -> None:
        with contextlib.suppress(OSError):
            self.run.write_result(result)
        self.run.emit(Phase(PhaseKind.ENDED, result.state))
        self.run.emit(Ended(result.state))


def main() -> None:
    """Run a mirror. Arguments in `sys.argv`: the run folder, and 'stays' or ''."""
    run, stays = RunDir(sys.argv[1]), bool(sys.argv[2])
    # Not SIG_IGN: child processes would inherit it, and could not be interrupted either.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    os.umask(0o077)
    with open(0, "rb", buffering=0, closefd=False) as lifeline:  # reads not a byte more
        order = json.loads(lifeline.readline())
    again = order["variables"] is None
    if again and run.is_running():
        return  # another command's mirror was quicker
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
