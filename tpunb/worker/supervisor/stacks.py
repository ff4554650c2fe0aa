"""Where the ranks of a hanging run are: their stacks, and the same in words.

Standard library only. Python's part comes from faulthandler, which every
rank registers for a signal and which writes also while C code holds the interpreter; the
native part from py-spy, where it is installed and may look.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpunb.runs.cell_lines import CellLines, read_block
from tpunb.runs.directory import RunDir
from tpunb.runs.heartbeat import Heartbeat, read_heartbeat
from tpunb.runs.spec import RunSpec
from tpunb.utils import processes
from tpunb.utils.processes import Process
from tpunb.utils.text import describe_ranks, excerpt

DUMP = signal.SIGRTMIN + 9
"""Ranks answer it with their stacks. Real-time signals are used by nothing else here."""

_WAIT = 5.0
"""Seconds for faulthandler: it writes as soon as the signal is delivered, frame by frame."""
_NATIVE_WAIT = 10.0
"""Seconds for py-spy, which reads the debug information of torch's libraries."""
_OURS = "tpunb/worker/rank.py"
"""Runs the cells, so its frames are below the notebook's, and are written after them."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LONGEST = 120
"""Characters of a line that are shown."""
_CUT = re.compile(r"^  \.\.\.$", re.MULTILINE)
_NAMES = {
    "torch_xla/core/xla_model.py": "xm",
    "torch_xla/runtime.py": "xr",
    "torch_xla/torch_xla.py": "torch_xla",
}


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is."""

    cell: int | None
    line: int | None
    words: str
    """'in xm.optimizer_step, cell [7], line 12: xm.optimizer_step(optimizer)'."""


def collect_stacks(
    run: RunDir,
    attempt: int,
    ranks: Mapping[int, Process],
    *,
    native: bool = True,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Have the living ranks write their stacks to `stacks.txt`, and add the native ones.

    It takes up to `_WAIT` + `_NATIVE_WAIT` seconds; `meanwhile` is called again and again.
    """
    # A rank that has not made its file yet would die of the signal: it is still in the fork.
    files = {rank: path for rank in ranks if (path := run.stacks(attempt, rank)).exists()}
    before = {rank: len(_written(path)) for rank, path in files.items()}
    waiting = {
        rank: path
        for rank, path in files.items()
        if processes.process_state(ranks[rank]) != "T" and processes.send_signal(ranks[rank], DUMP)
    }
    deadline = time.monotonic() + _WAIT
    while waiting and time.monotonic() < deadline:
        time.sleep(0.05)
        meanwhile()
        waiting = {r: p for r, p in waiting.items() if not _main_thread(_written(p)[before[r] :])}
    if native:
        _add_native({rank: (ranks[rank], path) for rank, path in files.items()}, meanwhile)


def _written(path: Path) -> str:
    """The stacks in a file; '' if somebody has deleted it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _add_native(ranks: Mapping[int, tuple[Process, Path]], meanwhile: Callable[[], None]) -> None:
    beside = Path(sys.executable).with_name("py-spy")
    spy = str(beside) if beside.exists() else shutil.which("py-spy")
    if spy is None:
        return
    looking = {
        rank: subprocess.Popen(
            [spy, "dump", "--native", "--pid", str(process.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for rank, (process, _) in ranks.items()
        if processes.is_alive(process)
    }
    deadline = time.monotonic() + _NATIVE_WAIT
    for rank, looker in looking.items():
        said = ""
        while not said:
            meanwhile()
            try:
                said = looker.communicate(timeout=0.5)[0] or "(py-spy has said nothing)"
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    looker.kill()
                    said = looker.communicate()[0] + f"\n(no more after {_NATIVE_WAIT:g} s)"
        # The folder may have been deleted, or be read-only by now: the supervisor goes on.
        with suppress(OSError), open(ranks[rank][1], "a", encoding="utf-8") as file:
            file.write(f"\n--- native (py-spy) ---\n{said.strip()}\n")


def describe_stacks(
    run: RunDir, spec: RunSpec, attempt: int, ranks: Mapping[int, Process | None]
) -> tuple[str, RankPlace | None]:
    """Who is where, a line for ranks in the same place; and the place to look at first.

    Ranks that others wait for come first: those outside of a collective, or else, of ranks that
    all wait, the fewest. Where ranks have done different numbers of steps or collectives, the
    numbers are said.
    """
    beats = {rank: read_heartbeat(run.heartbeat(attempt, rank)) or Heartbeat() for rank in ranks}
    counted = _counted(beats)
    places = {rank: _place(run, spec, attempt, rank, ranks[rank]) for rank in sorted(ranks)}
    groups: dict[str, list[int]] = {}
    for rank, place in places.items():
        groups.setdefault(place.words + counted[rank], []).append(rank)
    waiting = {rank for rank, beat in beats.items() if beat.waiting}
    ordered = sorted(
        groups.items(), key=lambda group: (waiting.issuperset(group[1]), len(group[1]), group[1])
    )
    lines = [f"{describe_ranks(members)}: {words}" for words, members in ordered]
    known = [places[members[0]] for _, members in ordered if places[members[0]].cell is not None]
    return "\n".join(lines), next(iter(known), None)


def _counted(beats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """', after 41 steps' for each rank, where the ranks differ; '' where they do not."""
    for word, counts in (
        ("step", {rank: beat.steps for rank, beat in beats.items()}),
        ("collective", {rank: beat.collectives_ended for rank, beat in beats.items()}),
    ):
        if len(set(counts.values())) > 1:
            return {
                rank: f", after {count} {word}{'' if count == 1 else 's'}"
                for rank, count in counts.items()
            }
    return dict.fromkeys(beats, "")


def _place(
    run: RunDir, spec: RunSpec, attempt: int, rank: int, process: Process | None
) -> RankPlace:
    if process is None or not processes.is_alive(process):
        return RankPlace(None, None, "has ended")
    if processes.process_state(process) == "T":
        return RankPlace(None, None, "is stopped (SIGSTOP, or a debugger)")
    path = run.stacks(attempt, rank)
    if not path.exists():
        words = "has not come out of the fork (does something in the cells above wait for a lock"
        return RankPlace(None, None, f"{words} there, or for another process? Try --replicate)")
    frames = _main_thread(_written(path))
    known = CellLines(run.script, spec)
    at = next((i for i, frame in enumerate(frames) if frame[0] in known), None)
    if at is None:
        return RankPlace(None, None, "is not in the notebook's code (see stacks.txt)")
    file, line, _ = frames[at]
    own = known.script_line(file, line) or 0
    cell, within = known.locate(file, line)
    source = ""
    for block in spec.blocks:
        if block.first <= own <= block.last:
            source = excerpt(read_block(run, block)[own - block.first].strip(), _LONGEST)
    inside = f"in {_named(frames[at - 1])}, " if at else "at "
    return RankPlace(cell, within, f"{inside}{known.describe(file, line)}: {source}")


def _main_thread(text: str) -> list[tuple[str, int, str]]:
    """File, line and function of the frames of the thread that runs the cells, innermost first."""
    parts = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    threads = [(part, _FRAME.findall(part)) for part in parts]
    # The main thread comes last. Of a deep recursion only the 100 innermost frames are written.
    # What py-spy adds has no such frames.
    ours = [frames for part, frames in threads if frames and (_OURS in part or _CUT.search(part))]
    return [(file, int(line), name) for file, line, name in ours[-1]] if ours else []


def _named(frame: tuple[str, int, str]) -> str:
    file, _, function = frame
    for end, short in _NAMES.items():
        if file.endswith(end):
            return f"{short}.{function}"
    path = Path(file)
    module = path.parent.name if path.stem == "__init__" else path.stem
    return f"{module}.{function}"
