"""How a run ended, put together from exit codes and what its processes left in the run folder."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tpunb import excerpt
from tpunb.models import Failure, RunResult, RunSpec, State, signal_name
from tpunb.rundir import RunDir
from tpunb.worker import memory
from tpunb.worker.rehearsal import tally

Why = Literal["interrupt", "timeout", "hung", "closed", "lost", "peer"]
"""Why ranks were stopped: a person, the time-out, no sign of life, the kernel's end, the
machine's, another rank's failure."""

RETURNCODES: dict[State, int] = {
    "succeeded": 0,
    "failed": 1,
    "hung": 124,
    "timed_out": 124,  # as coreutils' timeout
    "interrupted": 130,  # as a shell after SIGINT
}

CONSEQUENCES = ("PeerLostError", "WaitedTooLongError", "CollectiveError")
"""What ranks raise because another one is missing. It may be told before that one's end is seen."""

_CRASH_WORDS = {
    "SIGSEGV": "crashed with SIGSEGV (a segmentation fault in native code)",
    "SIGABRT": "crashed with SIGABRT (native code gave up)",
    "SIGBUS": "crashed with SIGBUS (a memory mapping could not be read; is /dev/shm full?)",
}


@dataclass(frozen=True)
class Exit:
    """A process of the run that has ended. `code` is negative for a signal."""

    rank: int | None
    pid: int | None
    code: int
    time: float
    peak: int = 0
    """Bytes of memory, at most."""
    memory: str = ""
    """How it is known that it was killed for its memory."""
    sent: frozenset[str] = frozenset()
    """The signals that the ranks had been sent by then, to stop them."""
    agent: bool = False
    """It is the agent, not the prelude, that has no rank."""


@dataclass(frozen=True)
class Stop:
    """The first reason for which the run was stopped."""

    why: Why
    reason: str
    time: float


@dataclass
class Observed:
    """What the guard has seen of a run by its end."""

    started: float
    ended: float
    exits: list[Exit]
    stop: Stop | None
    attempt: int
    replicate: str | None
    """Why every rank ran the prelude itself; None if it did not."""
    cell: int | None
    """The number of the prelude's cell that began last."""
    hang: Failure | None = None
    """Who waited where, if the run was called hung."""
    stderr: str = ""
    """The end of what the agent wrote, for when it could not even start."""


def compose(run: RunDir, spec: RunSpec, seen: Observed) -> RunResult:
    """How it ended: the earliest failure first, consequences of a stop left out.

    Of returns it has the names; the kernel reads the values.
    """
    failures = [
        excerpt.placed(failure, spec, run)
        for end in seen.exits
        if (end.code != 0 or run.error(seen.attempt, end.rank).exists())
        and (failure := _failure(run, spec, seen, end)) is not None
    ]
    failures.sort(key=lambda failure: (failure.type in CONSEQUENCES, failure.time))
    if seen.hang is not None:
        failures.insert(0, excerpt.placed(seen.hang, spec, run))
    state = _state(seen, failures)
    return RunResult(
        state=state,
        name=spec.name,
        world_size=spec.world_size,
        spmd=spec.spmd,
        device=spec.device,
        started=seen.started,
        ended=seen.ended,
        dir=run.path,
        returncode=RETURNCODES[state],
        attempts=seen.attempt + 1,
        failures=tuple(failures),
        peak_memory=_peaks(seen.exits),
        memory_limit=memory.total(),
        collectives=tuple(
            row
            for rank in range(spec.world_size)
            for row in tally.read(run.collectives(seen.attempt, rank))
        ),
        warm=spec.warm,
        replicated=seen.replicate is not None,
        replicate_reason=seen.replicate or "",
        reason=seen.stop.reason if seen.stop else "",
        price=spec.price,
        returns=dict.fromkeys(_returned(run)),
    )


def _state(seen: Observed, failures: list[Failure]) -> State:
    stop = seen.stop
    if seen.hang is not None:
        return "hung"
    failed_first = bool(failures) and (stop is None or failures[0].time < stop.time)
    if failed_first or (failures and stop is not None and stop.why == "peer"):
        return "failed"
    if stop is not None and stop.why != "peer":
        return "timed_out" if stop.why == "timeout" else "interrupted"
    return "failed" if failures else "succeeded"


def _failure(run: RunDir, spec: RunSpec, seen: Observed, end: Exit) -> Failure | None:
    """What an exit says, or None where it only follows from the stop."""
    signal = signal_name(-end.code) if end.code < 0 else None
    stopped = seen.stop is not None and end.time >= seen.stop.time
    told = None if end.agent else _read(run.error(seen.attempt, end.rank))
    if told is not None:
        if stopped and told["type"] == "KeyboardInterrupt":
            return None
        if _by_stop(seen.stop, told):
            return None
        if stopped and signal in end.sent:  # by us, on its way out: it has not failed by that
            return Failure(rank=end.rank, pid=end.pid, exitcode=None, signal=None, **told)
        return Failure(rank=end.rank, pid=end.pid, exitcode=end.code, signal=signal, **told)
    # By that only: it may have been killed a moment before the stop, and seen after it.
    if stopped and (signal in end.sent or (end.code == 130 and "SIGINT" in end.sent)):
        return None
    cell, line, stack = None, None, ""
    if not end.agent:
        cell, line, stack = _crash(run.attempt(seen.attempt, end.rank) / "crash.txt", spec)
        cell = seen.cell if end.rank is None else cell
    if end.memory:
        words = f"was killed because memory ran out ({_held(end)}; {end.memory})"
    elif signal == "SIGKILL":
        words = f"was killed with SIGKILL, most often because memory ran out ({_held(end)})"
    elif signal is not None:
        words = _CRASH_WORDS.get(signal, f"was ended by {signal}")
        if fatal := _fatal(run, seen, end.rank):
            words += f": {fatal}"
    else:
        words = f"ended with exit code {end.code} (os._exit, or native code that calls exit)"
    kind = "Signal" if signal else "Exit"
    if end.agent:
        kind, words = "Lost", f"the agent, the process that runs are forked from, {words}"
    return Failure(
        rank=end.rank,
        pid=end.pid,
        exitcode=end.code,
        signal=signal,
        type=kind,
        message=words,
        cell=cell,
        line=line,
        traceback=stack or _last_lines(run, seen, end.rank),
        time=end.time,
    )


def _by_stop(stop: Stop | None, told: dict[str, Any]) -> bool:
    """Whether a rank lost the others to the stop: they had its signal, and ended, before it."""
    ours = stop is not None and stop.why != "peer" and told["time"] >= stop.time
    return ours and told["type"] in CONSEQUENCES


def _peaks(exits: list[Exit]) -> tuple[int, ...]:
    peaks = {end.rank: end.peak for end in exits if end.rank is not None}
    return tuple(peaks.get(rank, 0) for rank in range(max(peaks, default=-1) + 1))


def _held(end: Exit) -> str:
    """'it held 3.1 GB of 13.6 GB at most'."""
    total = memory.limit()
    of = f" of {total}" if total else ""
    return f"it held {memory.size(end.peak)}{of} at most" if end.peak else f"there are {total}"


_FATAL = re.compile(
    # glog's and abseil's fatal lines; C++'s terminate; asserts of C, glibc and Rust.
    r"^F\d{4} .*|^.*\bCheck failed:.*|^\s*what\(\):.*|^terminate called.*|"
    r"^.*: Assertion .* failed\.?$|^\*\*\* .* \*\*\*.*$|^(?:malloc|free|double free|corrupted)\b.*|"
    r"^(?:LLVM ERROR|FATAL|Fatal glibc error)\b.*|^thread '.*' panicked at .*",
    re.MULTILINE,
)


def _fatal(run: RunDir, seen: Observed, rank: int | None) -> str:
    """The last line in which native code says why it gives up."""
    lines = _FATAL.findall(_last_lines(run, seen, rank, most=200))
    telling = [line for line in lines if not line.startswith("terminate called")] or lines
    return telling[-1].strip()[:300] if telling else ""


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return data


def _returned(run: RunDir) -> list[str]:
    report = _read(run.returns / "report.json") or {}
    return [name for name, entry in report.items() if "error" not in entry]


def _crash(path: Path, spec: RunSpec) -> tuple[int | None, int | None, str]:
    """Cell, line and stack of a crash from faulthandler's file.

    Its frames are listed innermost first; those below the notebook's are tpunb's own.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None, None, ""
    place: tuple[int | None, int | None] = (None, None)
    lines: list[str] = []
    for line in text.splitlines():
        match = re.match(r'\s*File "(.*)", line (\d+) in (.*)', line)
        if match and Path(match[1]).name == "script.py":
            number, within = spec.locate(int(match[2]))
            if place == (None, None):
                place = (number, within)
            lines.append(f"  cell [{number}], line {within}, in {match[3]}")
        elif match and place != (None, None):
            break
        elif line:
            lines.append(line)
    return (*place, "\n".join(lines))


def _last_lines(run: RunDir, seen: Observed, rank: int | None, most: int = 20) -> str:
    """The end of what a process wrote to its standard error, or of the agent's output."""
    if rank is None and seen.stderr:
        return seen.stderr
    stream = "prelude.log" if rank is None else "stderr.log"
    try:
        text = (run.attempt(seen.attempt, rank) / stream).read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-most:])
