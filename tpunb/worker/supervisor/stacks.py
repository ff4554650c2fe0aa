"""Collects the stacks of a hung run's ranks, and describes where each rank is.

Standard library only. Python's frames come from faulthandler, which every rank registers for a
signal and which writes even while C code holds the interpreter; native frames come from py-spy, if
it is installed and permitted to read the process.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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
_NATIVE_WAIT = 10.0
"""Seconds for py-spy, which reads the debug information of torch's libraries."""
_KILL_WAIT = 1.0
"""Seconds for py-spy to end when it is killed; usually it takes milliseconds."""
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
    """Has the living ranks write their stacks to `stacks.txt`, and appends the native ones.

    Never waits itself: `advance` is called until it returns True, after at most `_WAIT` +
    `_NATIVE_WAIT` seconds of `clock`. `close` gives up what has not arrived.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        ranks: Mapping[int, Process],
        *,
        native: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Send the ranks the signal on which they write their stacks."""
        self._ranks = ranks
        self._native = native
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
        self._dumps: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        self._deadline = clock() + _WAIT

    def advance(self) -> bool:
        """Check what has arrived. True once nothing more is expected."""
        late = self._clock() >= self._deadline
        if self._waiting:
            self._waiting = {rank for rank in self._waiting if not self._has_written(rank)}
            if self._waiting and not late:
                return False
            self._waiting.clear()
        if self._native:
            self._native, late = False, False
            self._deadline = self._clock() + _NATIVE_WAIT
            self._start_native()
        for rank in list(self._dumps):
            self._read_native(rank, late=late)
        return not self._dumps

    def close(self) -> None:
        """End the processes that were started for native stacks."""
        self._native = False
        for rank in list(self._dumps):
            self._read_native(rank, late=True)

    def _has_written(self, rank: int) -> bool:
        return bool(_main_thread(_written(self._files[rank])[self._before[rank] :]))

    def _start_native(self) -> None:
        beside = Path(sys.executable).with_name("py-spy")
        spy = str(beside) if beside.exists() else shutil.which("py-spy")
        if spy is None:
            return
        for rank in self._files:
            process = self._ranks[rank]
            if not processes.is_alive(process):
                continue
            # A full disk, no memory for another process, or py-spy cannot be executed.
            with suppress(OSError), ExitStack() as stack:
                output = stack.enter_context(tempfile.TemporaryFile())
                dump = subprocess.Popen(
                    [spy, "dump", "--native", "--pid", str(process.pid)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                self._dumps[rank] = dump, output
                stack.pop_all()  # `_read_native` closes it

    def _read_native(self, rank: int, *, late: bool) -> None:
        """Append the native stack of a rank if it is complete, or late."""
        dump, output = self._dumps[rank]
        ended = dump.poll() is not None
        if not ended and not late:
            return
        if not ended:
            dump.kill()
            with suppress(subprocess.TimeoutExpired):  # it hangs in a system call
                dump.wait(_KILL_WAIT)
        with output:
            output.seek(0)
            printed = output.read().decode("utf-8", "replace")
        printed = printed or ("(py-spy printed nothing)" if ended else "")
        cut = "" if ended else f"\n(cut off after {_NATIVE_WAIT:g} s)"
        # The folder may have been deleted, or be read-only by now: the supervisor continues.
        with suppress(OSError), open(self._files[rank], "a", encoding="utf-8") as file:
            file.write(f"\n--- native (py-spy) ---\n{printed.strip()}{cut}\n")
        del self._dumps[rank]


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
    # The part that py-spy adds has no such frames.
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
