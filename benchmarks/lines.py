"""The cost of printing many lines in ranks, and how many of the lines arrive."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.table import Samples, table
from benchmarks.ways import TPUNB, WAYS, Bench, notebook

LIMIT = 180.0
"""Seconds after which a cell is killed."""
LONG = 30.0
"""Seconds of a cell above which it is not measured in further rounds."""
CASES = ((2, 1), (4, 4))
"""Numbers of ranks, and of ranks that print."""
DO = """\
import sys


def say(rank, count, file):
    began = time.monotonic()
    for number in range(count):
        print(f"rank {rank} line {number:06d}: loss 0.123456, rate 0.001000", file=file)
    file.flush()
    return time.monotonic() - began


def do(rank, count, printing):
    if rank < printing:
        with open(folder / f"plain.{rank}", "w") as plain:
            to_file = say(rank, count, plain)
        began = time.monotonic()
        (folder / f"began.{rank}").write_text(str(began))
        printed = say(rank, count, sys.stdout)
        told = {"file": to_file, "printed": printed, "ended": time.monotonic()}
        (folder / f"told.{rank}").write_text(json.dumps(told))"""
LINE = re.compile(r"rank (\d) line (\d{6})")


@dataclass
class Seen:
    """Measurements of one way of starting ranks in one case, over all rounds."""

    file: Samples = field(default_factory=Samples)
    """Seconds of the slowest rank for printing the lines into a file."""
    printed: Samples = field(default_factory=Samples)
    """Seconds of the slowest rank for printing them to its standard output."""
    last: Samples = field(default_factory=Samples)
    """Seconds from printing the first line until the last line is in the cell."""
    shown: list[int] = field(default_factory=list)
    """Lines in the cell."""
    logged: list[int] = field(default_factory=list)
    """Lines in the log of the run."""
    over: bool = False
    """True if the cell was killed after LIMIT."""

    @property
    def is_long(self) -> bool:
        """True if one round is enough."""
        return self.over or max(self.last.all(), default=0.0) > LONG


def measure(folder: Path, rounds: int, count: int) -> str:
    """Measure all ways alternately, `rounds` times, with `count` lines from each printing rank."""
    seen: dict[tuple[str, tuple[int, int]], Seen] = {}
    for _ in range(rounds):
        for name in WAYS:
            cases = [case for case in CASES if not seen.setdefault((name, case), Seen()).is_long]
            while cases:
                with notebook(folder, name, DO) as bench:
                    # Killing a cell kills its kernel.
                    while cases and bench.kernel.is_there:
                        case = cases.pop(0)
                        _once(bench, name, case, count, seen[name, case])
    head = (
        f"Lines: {count:,} from each rank that prints. Seconds, of the slowest rank.\n"
        f"Cells that took over {LONG:.0f} s were measured once, and killed after {LIMIT:.0f} s.\n"
        "In the cell, %%tpu_train leaves out, and counts, lines that a Jupyter server would drop."
    )
    return "\n\n".join([head, *(_report(case, count, seen) for case in CASES)])


def _once(bench: Bench, name: str, case: tuple[int, int], count: int, seen: Seen) -> None:
    for pattern in ("began.*", "told.*"):
        for path in bench.folder.glob(pattern):
            path.unlink()
    ranks, printing = case
    given: dict[str, object] = {"count": count, "printing": printing}
    words = [f"rank {rank} line {count - 1:06d}:" for rank in range(printing)]
    started = bench.begin(ranks, given, words)
    running = started.running
    whole = started.read_until(lambda: running.idle is not None, LIMIT)
    seen.shown.append(len(set(LINE.findall(running.printed()))))
    if not whole:
        seen.over = True
        started.end()
        return
    if running.error is not None:
        raise AssertionError(f"{name} failed:\n{running.error}")
    times = [json.loads((bench.folder / f"told.{rank}").read_text()) for rank in range(printing)]
    began = min(float((bench.folder / f"began.{rank}").read_text()) for rank in range(printing))
    seen.file.add([max(rank["file"] for rank in times)])
    seen.printed.add([max(rank["printed"] for rank in times)])
    if running.found is not None:
        seen.last.add([running.found - began])
    if name == TPUNB:
        folder = bench.kernel.do("import tpunb; print(tpunb.last_run.dir)").stdout.strip()
        log = (Path(folder) / "run.log").read_text()
        seen.logged.append(len(set(LINE.findall(log))))


def _report(
    case: tuple[int, int], count: int, seen: dict[tuple[str, tuple[int, int]], Seen]
) -> str:
    ranks, printing = case
    rows = [
        (
            "",
            "into a file",
            "printed",
            "slowed by",
            "last line in the cell",
            "lines in the cell",
            "in run.log",
        )
    ]
    for name, way in WAYS.items():
        one = seen[name, case]
        shown = f"{min(one.shown):,}"
        if one.over:
            never = f"not in {LIMIT:.0f} s"
            rows.append((way.label, "", never, never, never, shown, "-"))
            continue
        slowed = Samples(
            [
                [printed[0] - plain[0]]
                for printed, plain in zip(one.printed.rounds, one.file.rounds, strict=True)
            ]
        )
        last = one.last.text(2) if len(one.last.rounds) == len(one.shown) else "never"
        logged = f"{min(one.logged):,}" if one.logged else "-"
        rows.append(
            (way.label, one.file.text(2), one.printed.text(2), slowed.text(2), last, shown, logged)
        )
    whom = f"All of {ranks} ranks print" if ranks == printing else f"{printing} of {ranks} prints"
    kept = min(seen[TPUNB, case].logged)
    goals = [
        ("goal", "measured", ""),
        (
            f"all {printing * count:,} lines in run.log",
            f"{kept:,}",
            "met" if kept == printing * count else "missed",
        ),
    ]
    return f"{whom}\n\n{table(rows)}\n\n{table(goals)}"
