"""History of the executions in this kernel, the one source that works with every front end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@dataclass(frozen=True)
class Execution:
    source: str
    """The text as it was sent, including magics."""
    number: int | None
    """The execution count shown next to the cell."""
    id: str | None = None
    """The front end's cell id. JupyterLab, Notebook 7, Colab and VS Code send one, nbclient and
    papermill do not. Cells that ran before tpunb was loaded have an id on Colab only."""
    failed: bool = False
    """True if it raised, or never started because it is not valid Python."""
    time: float = field(default=0.0, compare=False)
    """Start, in seconds since the epoch; the time tpunb was loaded if it ran before."""
    seconds: float | None = field(default=None, compare=False)
    """Duration; None if it has not ended, or ran before tpunb was loaded."""
    removed: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Environment variables that it removed, with their last values."""
    cwd: str = field(default="", compare=False, repr=False)
    """The working directory when it began; '' if unknown, or deleted by then."""


_CHANGES = re.compile(
    r"^[ \t]*%?(cd|pushd|popd)\b[ \t]*(?:-q\b[ \t]*)?(.*?)[ \t]*$|\bchdir\((['\"][^'\"]+['\"]\))?",
    re.M,
)
"""`%cd PATH` and the like, `os.chdir("PATH")`, and `os.chdir(` without a path that can be read."""


class History:
    """Records every execution in a shell, from its own creation until `close`.

    Earlier executions, and the cell that creates it, come from the shell's own history, which has
    texts and numbers but no ids (Colab's has ids). Executions with `store_history=False` or
    `silent=True` are the front end's, not the user's, and are ignored. Works with IPython 7.34
    to 9.x.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        raw: list[str] = list(shell.history_manager.input_hist_raw)  # type: ignore[union-attr]
        # The shell's list begins with an empty entry, so that In[1] is the first cell.
        removed = _removed_before()
        self._executions = [
            Execution(
                source, number, id, time=time.time(), removed=_named(removed, source), cwd=cwd
            )
            for number, (source, id, cwd) in enumerate(
                zip(raw, _ids_before(shell, raw), _folders_before(shell, raw), strict=True)
            )
            if source.strip()
        ]
        self._began: dict[int, float] = {}
        """Start times on the monotonic clock, by execution number."""
        self._variables: dict[int, dict[str, str]] = {}
        """The environment at the start of the running execution, by its number."""
        self._deleted: dict[str, float] = {}
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def executions(self) -> tuple[Execution, ...]:
        """All executions in order; the last is the running cell, if a cell is running."""
        return tuple(self._executions)

    def running(self) -> int | None:
        """The number of the running cell; None if unknown."""
        return self._executions[-1].number if self._executions else None

    def removed_variables(self, numbers: Collection[int]) -> dict[str, str]:
        """Variables that the executions with these numbers removed and that are still unset.

        Each has the value that was removed last.
        """
        return {
            name: value
            for execution in self._executions
            if execution.number in numbers
            for name, value in execution.removed.items()
            if name not in os.environ
        }

    def deleted(self) -> Mapping[str, float]:
        """Ids of cells that were deleted and not executed since, with the time of the message.

        Times are in seconds since the epoch. JupyterLab and Notebook 7 send the message with the
        next execution, also for a cell that was cut and pasted elsewhere and still exists.
        """
        return dict(self._deleted)

    def close(self) -> None:
        """Stop listening. The executions so far are kept."""
        self.shell.events.unregister("pre_run_cell", self._begin)
        self.shell.events.unregister("post_run_cell", self._end)

    def _begin(self, info: Any) -> None:
        if not info.store_history or info.silent:
            return
        # `shell.execution_count` is this cell's number until IPython 9.7 and the next one's
        # since 9.8 (it is counted up before the hook); the display hook knows in both.
        number = self.shell.displayhook.prompt_count
        metadata = _metadata(self.shell)
        id = _id(info, metadata)
        now = time.time()
        self._deleted.update((gone, now) for gone in _texts(metadata.get("deletedCells")))
        self._deleted.pop(id or "", None)
        self._executions.append(Execution(info.raw_cell, number, id, time=now, cwd=_cwd()))
        self._began[number] = time.monotonic()
        self._variables = {number: dict(os.environ)}

    def _end(self, result: Any) -> None:
        # IPython passes None if its own machinery failed.
        if result is None or not result.info.store_history or result.info.silent:
            return
        # The cell that loaded tpunb ends here as well, but its start time is unknown.
        began = self._began.pop(result.execution_count, None)
        took = None if began is None else time.monotonic() - began
        before = self._variables.pop(result.execution_count, {})
        removed = {name: value for name, value in before.items() if name not in os.environ}
        for index in range(len(self._executions) - 1, -1, -1):
            execution = self._executions[index]
            if execution.number == result.execution_count:
                failed = not result.success
                removed = {**execution.removed, **removed}
                self._executions[index] = replace(
                    execution, failed=failed, seconds=took, removed=removed
                )
                return


def _removed_before() -> dict[str, str]:
    """Variables that this process was started with and that are no longer set."""
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    started = dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if entry)
    return {name: value for name, value in started.items() if name not in os.environ}


def _named(variables: Mapping[str, str], source: str) -> dict[str, str]:
    words = set(re.findall(r"\w+", source))
    return {name: value for name, value in variables.items() if name in words}


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _folders_before(shell: InteractiveShell, sources: list[str]) -> list[str]:
    """The folder in which each earlier cell began.

    IPython keeps the folders that `%cd` has led to, without the cells, which their texts tell. If
    they do not lead to the current folder, the last cell that names a change is taken to do so.
    """
    visited, now = [str(each) for each in shell.user_ns.get("_dh", ())], _cwd()
    folder, visited = (visited or [now])[0], visited[1:]
    folders, last = [], -1
    for index, source in enumerate(sources):
        folders.append(folder)
        for magic, path, code in _CHANGES.findall(source):
            last = index
            path = (path or code).strip("'\")")
            there = os.path.realpath(os.path.join(folder, os.path.expanduser(path or "~")))
            if code:
                folder = there
            elif magic and visited and (path[:1] == "-" or "$" in path or there == visited[0]):
                folder = visited.pop(0)
    return folders if folder == now else [*folders[: last + 1], *[now] * (len(folders) - last - 1)]


def _metadata(shell: InteractiveShell) -> Mapping[str, Any]:
    """Metadata that the front end sent with the code of the running cell; may be empty."""
    # Only ipykernel's shells have the request. IPython 9 passes the metadata to hooks as well.
    message = getattr(shell, "parent_header", None)
    metadata = message.get("metadata") if isinstance(message, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def _id(info: Any, metadata: Mapping[str, Any]) -> str | None:
    """The cell's id: `cellId` in the metadata, which IPython 8.1 and later pass on, or Colab's
    own id (googlecolab/colabtools 3c07d77, google/colab/_history.py).
    """
    colab = metadata.get("colab")
    own = colab.get("cell_id") if isinstance(colab, Mapping) else None
    id = getattr(info, "cell_id", None) or metadata.get("cellId") or own
    return id if isinstance(id, str) and id else None


def _ids_before(shell: InteractiveShell, raw: list[str]) -> list[str | None]:
    """Ids of earlier executions, which Colab's shell keeps along with the texts (same source)."""
    kept = getattr(shell.history_manager, "_input_hist_cells", None)
    if not isinstance(kept, list) or [entry.get("code") for entry in kept] != raw:
        return [None] * len(raw)
    return [entry.get("cell_id") or None for entry in kept]


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
