"""What has been executed in this kernel: the one thing that is true of every front end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@dataclass(frozen=True)
class Execution:
    """One execution of a cell."""

    source: str
    """As it was sent, magics and all."""
    number: int | None
    """The execution count that is shown beside the cell."""
    id: str | None = None
    """The front end's cell id. JupyterLab, Notebook 7, Colab and VS Code send one, nbclient and
    papermill do not, and but for Colab nothing has it that ran before tpunb was loaded."""
    failed: bool = False
    """It raised, or never began because it is not valid Python."""
    time: float = field(default=0.0, compare=False)
    """When it began, in seconds since the epoch; when tpunb was loaded, if it ran before."""


class History:
    """Remembers every execution in a shell, from the moment it is made until `close`.

    What ran before, and the cell that makes it, comes from the shell's own history, which
    knows texts and numbers but no ids (Colab's does). Executions with `store_history=False` or
    `silent=True` are the front end's, not the user's, and do not count. Works with IPython 7.34
    to 9.x.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        raw: list[str] = list(shell.history_manager.input_hist_raw)  # type: ignore[union-attr]
        # The shell's list begins with an empty entry, so that In[1] is the first cell.
        self._executions = [
            Execution(source, number, id, time=time.time())
            for number, (source, id) in enumerate(zip(raw, _ids_before(shell, raw), strict=True))
            if source.strip()
        ]
        self._deleted: dict[str, float] = {}
        shell.events.register("pre_run_cell", self._begin)
        shell.events.register("post_run_cell", self._end)

    def executions(self) -> tuple[Execution, ...]:
        """All of them in order; the last one is the cell that is running now, if one is."""
        return tuple(self._executions)

    def deleted(self) -> Mapping[str, float]:
        """Ids of cells that were deleted and not executed since, and when that was heard of.

        JupyterLab and Notebook 7 tell with the next execution, in seconds since the epoch. They
        tell it too of a cell that was cut and put back elsewhere, and may still be there.
        """
        return dict(self._deleted)

    def close(self) -> None:
        """Stop listening. What was remembered stays."""
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
        self._executions.append(Execution(info.raw_cell, number, id, time=now))

    def _end(self, result: Any) -> None:
        # IPython passes None where the machinery itself failed.
        if result is None or result.success or not result.info.store_history:
            return
        for index in range(len(self._executions) - 1, -1, -1):
            if self._executions[index].number == result.execution_count:
                self._executions[index] = replace(self._executions[index], failed=True)
                return


def _metadata(shell: InteractiveShell) -> Mapping[str, Any]:
    """What the front end sent beside the code of the cell that is running; empty if nothing."""
    # Shells of ipykernel have the request, others do not. IPython 9 gives this to hooks too.
    message = getattr(shell, "parent_header", None)
    metadata = message.get("metadata") if isinstance(message, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}


def _id(info: Any, metadata: Mapping[str, Any]) -> str | None:
    """The cell's id: `cellId` of the metadata, which IPython 8.1 and later pass on, or Colab's
    own (googlecolab/colabtools 3c07d77, google/colab/_history.py).
    """
    colab = metadata.get("colab")
    own = colab.get("cell_id") if isinstance(colab, Mapping) else None
    id = getattr(info, "cell_id", None) or metadata.get("cellId") or own
    return id if isinstance(id, str) and id else None


def _ids_before(shell: InteractiveShell, raw: list[str]) -> list[str | None]:
    """The ids of what ran before, which Colab's shell keeps beside the texts (same source)."""
    kept = getattr(shell.history_manager, "_input_hist_cells", None)
    if not isinstance(kept, list) or [one.get("code") for one in kept] != raw:
        return [None] * len(raw)
    return [one.get("cell_id") or None for one in kept]


def _texts(value: object) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
