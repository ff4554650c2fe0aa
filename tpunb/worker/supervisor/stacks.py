"""Collects the stacks of a hung run's ranks, and describes where each rank is.

Standard library only. The frames come from faulthandler, which every rank registers for a signal
and which writes even while C code holds the interpreter.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping
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
"""The signal on which ranks write their stacks. tpunb uses no other real-time signal."""

_WAIT = 5.0
"""Seconds for faulthandler, which writes frame by frame as soon as the signal is delivered."""
_OURS = "tpunb/worker/rank.py"
"""The module that runs the cells: its frames are below the notebook's, and are written later."""
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LONGEST = 120
"""Characters shown of a line."""
_CUT = re.compile(r"^  \.\.\.$", re.MULTILINE)
_NAMES = {
    "torch_xla/core/xla_model.py": "xm",
    "torch_xla/runtime.py": "xr",
    "torch_xla/torch_xla.py": "torch_xla",
}


@dataclass(frozen=True)
class RankPlace:
    cell: int | None
    line: int | None
    words: str
    """A description: 'in xm.optimizer_step, cell [7], line 12: xm.optimizer_step(optimizer)'."""


class StackCollection:
    """Has the living ranks write their stacks to `stacks.txt`.

    Never waits itself: `advance` is called until it returns True, after at most `_WAIT` seconds of
    `clock`.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Mapping[int, Process],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send the ranks the signal on which they write their stacks."""
        self._clock = clock
        # A rank that has not made its file yet is still in the fork, and would die of the signal.
        self._files = {rank: path for rank in ranks if (path := run.stacks(attempt, rank)).exists()}
        self._before = {rank: len(_written(path)) for rank, path in self._files.items()}
        self._waiting = {
            rank
            for rank in self._files
            if processes.process_state(ranks[rank]) != "T"
            and processes.send_signal(ranks[rank], DUMP)
        }
        self._deadline = clock() + _WAIT

    def advance(self) -> bool:
        """Check what has arrived. True once nothing more is expected."""
        self._waiting = {rank for rank in self._waiting if not self._has_written(rank)}
        return not self._waiting or self._clock() >= self._deadline

    def _has_written(self, rank: int) -> bool:
        return bool(_main_thread(_written(self._files[rank])[self._before[rank] :]))


def _written(path: Path) -> str:
    """The stacks in a file; '' if the file was deleted."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def describe_stacks(
    run: RunDir, spec: RunSpec, attempt: int, ranks: Mapping[int, str]
) -> tuple[str, RankPlace | None]:
    """Where each rank is, with one line for all ranks in the same place; and the first such place.

    `ranks`: the state of each rank, as in `RankState`.

    Ranks that others wait for come first: the ranks outside of a collective, or, if all ranks wait,
    the smallest group. If ranks have done different numbers of steps or collectives, the numbers
    are given.
    """
    beats = {rank: read_heartbeat(run.heartbeat(attempt, rank)) or Heartbeat() for rank in ranks}
    progress = _describe_progress(beats)
    places = {rank: _place(run, spec, attempt, rank, ranks[rank]) for rank in sorted(ranks)}
    groups: dict[str, list[int]] = {}
    for rank, place in places.items():
        groups.setdefault(place.words + progress[rank], []).append(rank)
    waiting = {rank for rank, beat in beats.items() if beat.waiting}
    ordered = sorted(
        groups.items(), key=lambda group: (waiting.issuperset(group[1]), len(group[1]), group[1])
    )
    name = spec.name_ranks if spec.hosts else describe_ranks
    lines = [f"{name(members)}: {words}" for words, members in ordered]
    known = [places[members[0]] for _, members in ordered if places[members[0]].cell is not None]
    return "\n".join(lines), next(iter(known), None)


def _describe_progress(beats: Mapping[int, Heartbeat]) -> dict[int, str]:
    """', after 41 steps' for each rank if the ranks differ; '' if they do not."""
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


def _place(run: RunDir, spec: RunSpec, attempt: int, rank: int, state: str) -> RankPlace:
    if not state:
        return RankPlace(None, None, "has ended")
    if state == "T":
        return RankPlace(None, None, "is stopped (SIGSTOP, or a debugger)")
    path = run.stacks(attempt, rank)
    if not path.exists():
        words = "has not returned from the fork (code from the cells above may wait for a lock"
        return RankPlace(None, None, f"{words} or for another process: try --replicate)")
    known = CellLines(run.script, spec)
    # On another host the run's folder has the same name, in another place.
    ours, script = f"/{run.id}/{run.script.name}", str(run.script)
    frames = [
        (script if file.endswith(ours) else file, line, name)
        for file, line, name in _main_thread(_written(path))
    ]
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
    # torch.distributed's functions are called by a decorator's `wrapper`.
    called = [frame for frame in frames[:at] if frame[2] != "wrapper"]
    inside = f"in {_named(called[-1])}, " if called else "at "
    return RankPlace(cell, within, f"{inside}{known.describe(file, line)}: {source}")


def _main_thread(text: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame of the thread that runs the cells, innermost first."""
    parts = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)
    threads = [(part, _FRAME.findall(part)) for part in parts]
    # The main thread comes last. Only the 100 innermost frames of a deep recursion are written.
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
