"""Seconds until a cell reports a failed rank, and until no process is left after a stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.table import Samples, met, table
from benchmarks.ways import TPUNB, WAYS, Bench, notebook

RANKS = 2
LIMIT = 40.0
"""Seconds after which the remaining processes are counted and killed."""
GRACE = 15.0
"""Default seconds that ranks have to save after a stop."""
DO = """\
import ctypes


def do(rank, kind):
    if kind == "fail":
        time.sleep(0.5)
        if rank == 1:
            (folder / "failed").write_text(str(time.monotonic()))
            raise ValueError("a batch of the wrong shape")
        time.sleep(60)
    if kind == "loop":
        while True:
            time.sleep(0.001)
    if kind in ("call", "nohup"):
        # Waits for ever while it holds the interpreter's lock, also after every signal.
        mutex, lock = ctypes.create_string_buffer(64), ctypes.PyDLL(None).pthread_mutex_lock
        while True:
            lock(mutex)"""
HEADS = {
    "fail": "Rank 1 raises an error while rank 0 is busy: seconds from there",
    "loop": "The stop button, while the ranks are in a Python loop: seconds from there",
    "call": "The stop button, while the ranks are in a C call that does not return: the same",
    "nohup": "That C call again, in the kernel of a Jupyter that was started with nohup",
}


@dataclass
class Seen:
    """Measurements of one way of starting ranks with one kind of end, over all rounds."""

    back: Samples = field(default_factory=Samples)
    """Seconds until the cell's error, or until its end if there was none."""
    gone: Samples = field(default_factory=Samples)
    """Seconds until the last process had ended."""
    left: list[int] = field(default_factory=list)
    """Number of processes that were left, in each round."""
    hung: int = 0
    """Number of rounds in which the cell did not end."""
    failed: int = 0
    """Number of rounds in which the cell failed, as it should."""


def measure(folder: Path, rounds: int, kinds: tuple[str, ...] = tuple(HEADS)) -> str:
    """Measure all ways alternately, `rounds` times; returns a table for each kind of end."""
    seen: dict[tuple[str, str], Seen] = {}
    for _ in range(rounds):
        for name in WAYS:
            groups = [[kind for kind in kinds if kind != "nohup"], ["nohup"] * ("nohup" in kinds)]
            for group in filter(None, groups):
                with _hangups(ignored="nohup" in group), notebook(folder, name, DO) as bench:
                    for kind in group:
                        _once(bench, kind, seen.setdefault((name, kind), Seen()))
    head = (
        f"Ends: {RANKS} ranks, measured at the client of the kernel. Processes are all new ones"
        f"\nbelow the kernel; those that are left after {LIMIT:.0f} s are killed."
    )
    return "\n\n".join([head, *(_report(kind, seen) for kind in kinds)])


@contextmanager
def _hangups(*, ignored: bool) -> Iterator[None]:
    """Determine whether processes started in the block ignore SIGHUP, as below nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _once(bench: Bench, kind: str, seen: Seen) -> None:
    failed = bench.folder / "failed"
    failed.unlink(missing_ok=True)
    started = bench.begin(RANKS, {"kind": kind}, [])
    if kind == "fail":
        started.read_until(lambda: failed.exists() and failed.read_text(), LIMIT)
        since = float(failed.read_text())
    else:
        started.read_until(lambda: False, 0.5)  # so that the ranks reach the loop or the call
        started.look()
        since = time.monotonic()
        bench.kernel.interrupt()
    started.read_to_the_end(since + LIMIT - time.monotonic())
    running, left = started.running, started.left()
    if running.idle is None:
        seen.hung += 1
    else:
        seen.back.add([(running.raised or running.idle) - since])
        seen.failed += running.error is not None
    if started.gone is not None:
        seen.gone.add([started.gone - since])
    seen.left.append(len(left))
    if left or running.idle is None:
        started.end()


def _report(kind: str, seen: dict[tuple[str, str], Seen]) -> str:
    never = f"not in {LIMIT:.0f} s"
    rows = [("", "cell is back", "and has failed", "last process gone", "processes left")]
    for name, way in WAYS.items():
        measured = seen[name, kind]
        rounds = len(measured.left)
        rows.append(
            (
                way.label,
                measured.back.text(2) if not measured.hung else never,
                _rounds(measured.failed, rounds),
                measured.gone.text(2) if not any(measured.left) else never,
                " or ".join(str(number or "none") for number in sorted(set(measured.left))),
            )
        )
    if kind == "fail":
        return f"{HEADS[kind]}\n\n{table(rows)}"
    mine = seen[TPUNB, kind]
    goals = [
        ("goal", "measured", ""),
        (
            f"%%tpu_train: all gone within its grace of {GRACE:.0f} s + 2 s",
            f"{mine.gone.text(2)} s" if not any(mine.left) else never,
            met(mine.gone, most=GRACE + 2.0) if not any(mine.left) else "missed",
        ),
    ]
    return f"{HEADS[kind]}\n\n{table(rows)}\n\n{table(goals)}"


def _rounds(times: int, rounds: int) -> str:
    if times in (0, rounds):
        return "yes" if times else "no"
    return f"in {times} of {rounds} rounds"
