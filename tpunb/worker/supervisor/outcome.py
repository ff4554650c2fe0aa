"""Determines how a run ended, from exit codes and the files that its processes left.

    exits, error.json, crash.txt ──> failures, earliest first, without those that a stop caused

    state        the first that applies:
    hung         a hang was detected
    failed       a failure is older than the stop, or the stop was for a failed rank
    timed_out    the run was stopped for its time-out
    interrupted  the run was stopped for any other cause
    failed       there are failures
    succeeded    there are none

Standard library only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from tpunb.backends.rehearsal import stats
from tpunb.runs.cell_lines import CellLines, read_block, read_cell
from tpunb.runs.directory import RunDir
from tpunb.runs.heartbeat import read_heartbeat
from tpunb.runs.parameters import parameters
from tpunb.runs.protocol import ImportsFailed
from tpunb.runs.result import Failure, RunResult, signal_name
from tpunb.runs.spec import Block, FailureKind, RunSpec, RunState, Stop, StopCause
from tpunb.runs.trained_models import DifferentModels, find_difference, read_models
from tpunb.utils import memory, records
from tpunb.utils.files import read_end
from tpunb.utils.text import excerpt, size

RETURNCODES: dict[RunState, int] = {
    RunState.SUCCEEDED: 0,
    RunState.FAILED: 1,
    RunState.HUNG: 124,
    RunState.TIMED_OUT: 124,  # as coreutils' timeout
    RunState.INTERRUPTED: 130,  # as a shell after SIGINT
}

AROUND = 2
"""Lines of the cell that are kept before and after the line that failed."""
LONGEST = 120
"""Characters that are kept of each such line."""
MOST_RECORDS = 10**12
"""The most lost records of a rank that are believed: its file may be damaged."""
LOG_END = 1_000_000
"""Bytes of the end of a process's output that are searched. The whole may be gigabytes."""

_CRASH_WORDS = {
    "SIGSEGV": "crashed with SIGSEGV (a segmentation fault in native code)",
    "SIGABRT": "crashed with SIGABRT (native code aborted)",
    "SIGBUS": "crashed with SIGBUS (memory that was mapped could not be read)",
}
_FORK_SERVER = "the fork server, which starts the processes of a run,"
_WATCHER = "the process that watches the ranks"
_NOT_SENT = "not sent by tpunb: another process sent SIGINT (kill -INT), or the code raised it"


@dataclass(frozen=True)
class ProcessExit:
    """The exit of one process of the run. `code` is negative for a signal."""

    rank: int | None
    """None for the runner or the fork server."""
    pid: int | None
    code: int
    time: float
    peak: int = 0
    """The most memory that the process held at once, in bytes."""
    memory: str = ""
    """Evidence that the kernel killed the process because memory ran out; '' without evidence."""
    signals_sent: frozenset[str] = frozenset()
    """The signals that tpunb had sent to the ranks by then, to stop them."""
    node: int = 0
    """The node rank of its host; 0 on one machine."""
    fork_server_output: str | None = None
    """The end of the fork server's output, if it has ended; None for another process."""
    imports_failed: ImportsFailed | None = None
    """The exception that ended the fork server."""
    finished: bool = True
    """For a rank: its train cell has ended well. For the runner: it has ended by itself."""
    ranks_forked: bool = False
    """For the runner: the prelude was over, and the runner watched the ranks."""

    @property
    def fork_server(self) -> bool:
        """True for the fork server."""
        return self.fork_server_output is not None

    @property
    def failed(self) -> bool:
        """True for exit code 0, too, if the train cell did not end: os._exit(0)."""
        return self.code != 0 or not self.finished


@dataclass
class RunObservation:
    """Everything that the supervisor has observed of a run by its end."""

    started: float
    ended: float
    exits: list[ProcessExit]
    stop: Stop | None
    """The first stop of the run."""
    attempt: int
    replicate: str | None
    """Why every rank ran the prelude itself; None if they did not."""
    cell: int | None
    """The number of the prelude's cell that began last."""
    stopped: float = math.inf
    """The time of the stop."""
    hang: Failure | None = None
    """Which ranks waited where, if the run was hung."""
    host_failures: tuple[Failure, ...] = ()
    """Failures of lost hosts, or the reason why nothing was started on any host."""


def build_result(run: RunDir, spec: RunSpec, seen: RunObservation) -> RunResult:
    """The result of a run. `returns` has the names only; the kernel reads the values."""
    ranks = range(spec.world_size)
    failures = [
        replace(with_source(failure, spec, run), host=spec.hosts[end.node] if spec.hosts else None)
        for end in seen.exits
        if (end.failed or _folder(run, end).error(seen.attempt, end.rank).exists())
        and (failure := _failure(run, spec, seen, end)) is not None
    ]
    failures += seen.host_failures
    # Errors that follow from a lost peer may be reported before that peer's exit is seen.
    failures.sort(key=lambda failure: (failure.kind is FailureKind.PEER_LOST, failure.time))
    if seen.hang is not None:
        failures.insert(0, with_source(seen.hang, spec, run))
    if not failures and (seen.stop is None or seen.stop.for_failed_peer):
        failures = _without_end(ranks, seen)
    state = _state(seen, failures)
    succeeded = state is RunState.SUCCEEDED
    return RunResult.of_spec(
        spec,
        run.path,
        state,
        seen.started,
        seen.ended,
        returncode=RETURNCODES[state],
        attempts=seen.attempt + 1,
        failures=tuple(failures),
        peak_memory=_peaks(seen.exits),
        memory_limit=0 if spec.hosts else memory.total_memory(),
        collectives=tuple(
            row
            for rank in ranks
            for row in stats.read_collectives(run.collectives(seen.attempt, rank))
        ),
        different_models=_compare_models(run, seen.attempt, ranks) if succeeded else None,
        lost_records=sum(
            min(beat.lost_records, MOST_RECORDS)
            for rank in ranks
            if (beat := read_heartbeat(run.heartbeat(seen.attempt, rank))) is not None
        ),
        replicated=seen.replicate is not None,
        replicate_reason=seen.replicate or "",
        reason=seen.stop.reason if seen.stop else "",
        stop=seen.stop.without_reason() if seen.stop else None,
        parameters=parameters(run),
        returns=dict.fromkeys(_returned_names(run)),
    )


def _compare_models(run: RunDir, attempt: int, ranks: range) -> DifferentModels | None:
    return find_difference({rank: read_models(run.models(attempt, rank)) for rank in ranks})


def _folder(run: RunDir, end: ProcessExit) -> RunDir:
    """Where the files of a process are: those of another host's prelude are not the run's."""
    return run if end.rank is not None or end.node == 0 else run.host(end.node)


def _state(seen: RunObservation, failures: list[Failure]) -> RunState:
    if seen.hang is not None:
        return RunState.HUNG
    stop = seen.stop
    failed_first = bool(failures) and failures[0].time <= seen.stopped
    if failed_first or (failures and stop is not None and stop.for_failed_peer):
        return RunState.FAILED
    if stop is not None and not stop.for_failed_peer:
        timed_out = stop.cause is StopCause.TIMEOUT
        return RunState.TIMED_OUT if timed_out else RunState.INTERRUPTED
    return RunState.FAILED if failures else RunState.SUCCEEDED


def _without_end(ranks: range, seen: RunObservation) -> list[Failure]:
    """A failure for the first rank that did not report the end of its train cell, if any.

    Only if all ranks have reported their end is a run a success.
    """
    finished = {end.rank for end in seen.exits if not end.failed}
    for rank in ranks:
        if rank not in finished:
            message = "has not reached the end of the train cell, for an unknown reason"
            return [Failure.of(FailureKind.EXIT, message, rank=rank, time=seen.ended)]
    return []


def _failure(run: RunDir, spec: RunSpec, seen: RunObservation, end: ProcessExit) -> Failure | None:
    """The failure behind an exit; None if the exit only follows from the stop."""
    signal = signal_name(-end.code) if end.code < 0 else None
    folder = _folder(run, end)
    error = None if end.fork_server else folder.read_error(seen.attempt, end.rank)
    if error is not None:
        failure = replace(error, pid=end.pid, exitcode=end.code, signal=signal)
        if _is_interrupt(failure):
            if failure.time >= seen.stopped:
                return None
            failure = replace(failure, message=failure.message or _NOT_SENT)
        if _follows_from_stop(seen, failure):
            return None
        if end.ranks_forked:
            return _lost(failure, f"{_WATCHER} failed: {failure.type}: {failure.message}")
        if end.time >= seen.stopped and signal in end.signals_sent:
            # Killed by tpunb while it was ending: it had failed before.
            return replace(failure, exitcode=None, signal=None)
        return failure
    # The stop explains only these signals: the process may have been killed a moment before the
    # stop, and its exit seen after it.
    sent = end.signals_sent
    if end.time >= seen.stopped:
        by_itself = end.code in (0, 130)  # after its KeyboardInterrupt, by os._exit
        if signal in sent or ("SIGINT" in sent and by_itself):
            return None
    cell, line, stack = None, None, ""
    if not end.fork_server:
        crash = folder.attempt(seen.attempt, end.rank) / "crash.txt"
        cell, line, stack = _crash(crash, CellLines(run.script, spec))
        cell = seen.cell if end.rank is None else cell
    if end.memory:
        message = f"was killed because memory ran out ({_held(end, spec)}; {end.memory})"
    elif signal == "SIGKILL":
        held = f" ({_held(end, spec)})" if end.peak else ""
        message = f"was killed with SIGKILL by an unknown sender{held}"
    elif signal is not None:
        message = _CRASH_WORDS.get(signal, f"was ended by {signal}")
        if fatal := _fatal_line(folder, seen, end):
            message += f": {fatal}"
    else:
        message = f"ended with exit code {end.code} (os._exit, or native code that calls exit)"
        if end.code == 0:
            before = "the train cell" if end.rank is None else "the end of the train cell"
            message = f"ended before {before} (os._exit(0), exec, or native code that calls exit)"
    failure = Failure.of(
        _kind(end),
        message,
        rank=end.rank,
        pid=end.pid,
        exitcode=end.code,
        signal=signal,
        cell=cell,
        line=line,
        traceback=stack or _last_lines(folder, seen, end),
        time=end.time,
    )
    if end.fork_server:
        if (why := end.imports_failed) is None:
            return _lost(failure, f"{_FORK_SERVER} {message}")
        if why.of_tpunb:
            return replace(_lost(failure, why.message), type=why.type, traceback="")
        message = f"{_FORK_SERVER} failed: {why.type}: {why.message}"
        return replace(_lost(failure, message), type=why.type)
    return _lost(failure, f"{_WATCHER} {message}") if end.ranks_forked else failure


def _lost(failure: Failure, message: str) -> Failure:
    """The failure of a process of tpunb itself, which belongs to no cell."""
    return replace(
        failure, type="Lost", kind=FailureKind.LOST, message=message, cell=None, line=None
    )


def _is_interrupt(failure: Failure) -> bool:
    return failure.type == KeyboardInterrupt.__name__


def _kind(end: ProcessExit) -> FailureKind:
    """The kind of failure of a process that has left no exception."""
    if end.memory:
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.SIGNAL if end.code < 0 else FailureKind.EXIT


def _follows_from_stop(seen: RunObservation, failure: Failure) -> bool:
    """True if a rank lost its peers because of the stop: its signal ended them before this rank."""
    stop = seen.stop
    stopped = stop is not None and not stop.for_failed_peer and failure.time >= seen.stopped
    return stopped and failure.kind is FailureKind.PEER_LOST


def _peaks(exits: list[ProcessExit]) -> tuple[int, ...]:
    peaks = {end.rank: end.peak for end in exits if end.rank is not None}
    return tuple(peaks.get(rank, 0) for rank in range(max(peaks, default=-1) + 1))


def _held(end: ProcessExit, spec: RunSpec) -> str:
    """'it held 3.1 GB of 13.6 GB at most'; the limit of another machine is not known."""
    total = "" if spec.hosts else memory.describe_memory_limit()
    of = f" of {total}" if total else ""
    if end.peak:
        return f"it held {size(end.peak)}{of} at most"
    return f"there are {total}" if total else "its size is not known"


_FATAL = re.compile(
    # glog's and abseil's fatal lines; C++'s terminate; asserts of C, glibc and Rust.
    r"^F\d{4} .*|^.*\bCheck failed:.*|^\s*what\(\):.*|^terminate called.*|"
    r"^.*: Assertion .* failed\.?$|^\*\*\* .* \*\*\*.*$|^(?:malloc|free|double free|corrupted)\b.*|"
    r"^(?:LLVM ERROR|FATAL|Fatal glibc error)\b.*|^thread '.*' panicked at .*",
    re.MULTILINE,
)


def _fatal_line(run: RunDir, seen: RunObservation, end: ProcessExit) -> str:
    """The last line in which native code prints why it aborts; '' if there is none."""
    lines = _FATAL.findall(_last_lines(run, seen, end, most=200))
    lines = [line for line in lines if not line.startswith("terminate called")] or lines
    return lines[-1].strip()[:300] if lines else ""


def _returned_names(run: RunDir) -> list[str]:
    report = records.read_dict(run.returns / "report.json")
    return [name for name, entry in report.items() if "error" not in entry]


def _crash(path: Path, lines: CellLines) -> tuple[int | None, int | None, str]:
    """Cell, line and stack of a crash, from faulthandler's file.

    The file lists the innermost frame first; frames below the notebook's are tpunb's own.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None, None, ""
    place: tuple[int | None, int | None] = (None, None)
    stack: list[str] = []
    for text_line in text.splitlines():
        match = re.match(r'\s*File "(.*)", line (\d+) in (.*)', text_line)
        if match and match[1] in lines:
            number, within = lines.locate(match[1], int(match[2]))
            if place == (None, None):
                place = (number, within)
            stack.append(f"  cell [{number}], line {within}, in {match[3]}")
        elif match and place != (None, None):
            break
        elif text_line:
            stack.append(text_line)
    return (*place, "\n".join(stack))


def _last_lines(run: RunDir, seen: RunObservation, end: ProcessExit, most: int = 20) -> str:
    """The end of a process's standard error, or of the fork server's output."""
    if end.fork_server_output:
        return end.fork_server_output
    stream = "prelude.log" if end.rank is None else "stderr.log"
    try:
        tail = read_end(run.attempt(seen.attempt, end.rank) / stream, LOG_END)
    except OSError:
        return ""
    return "\n".join(tail.decode("utf-8", "replace").splitlines()[-most:])


def with_source(failure: Failure, spec: RunSpec, run: RunDir) -> Failure:
    """The failure with the source lines around it as they ran, and its cell's id, if known."""
    if failure.cell is None or failure.line is None or not run.script.exists():
        return failure
    for block in spec.blocks:
        # A cell that calls tpunb.launch has two blocks: the lines above the call, and the call.
        if block.number == failure.cell and failure.line <= block.last - block.first + 1:
            source = _lines_around(block, failure, run)
            return replace(failure, source=source, cell_id=read_cell(run, block).get("id"))
    return failure


def _lines_around(block: Block, failure: Failure, run: RunDir) -> tuple[tuple[int, str], ...]:
    at, lines = failure.line or 0, read_block(run, block)
    if not 1 <= at <= len(lines):
        return ()
    return tuple(
        (n, excerpt(lines[n - 1], LONGEST, around=failure.column or 0 if n == at else 0))
        for n in range(max(1, at - AROUND), min(len(lines), at + AROUND) + 1)
    )
