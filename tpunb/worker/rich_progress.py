"""Makes progress bars of rich, which prints none without a terminal, the run's progress.

This includes bars of libraries, such as Lightning's RichProgressBar, its default if rich is
installed. (Libraries that use tqdm, such as transformers, print bars that are read as text.)

Replaces public methods of `rich.progress.Progress` (`update`, `advance`) and reads its public
`tasks`. Checked on rich 13.9 to 15.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tpunb.runs.events import Bar
from tpunb.runs.progress import ProgressFile, progress_path
from tpunb.utils.patching import Replacements


def follow_rich_bars() -> None:
    """In a rank: follow rich's bars, now or as soon as rich is imported."""
    path = progress_path()
    if path is not None:
        _Followed(ProgressFile(path)).names.begin()


class _Followed:
    """Replaces the methods that advance a bar by ones that also write its state to a file."""

    def __init__(self, file: ProgressFile) -> None:
        self._file = file
        self.names = Replacements({"rich.progress": self._replace})

    def _replace(self, module: ModuleType) -> None:
        for name in ("update", "advance"):
            method = vars(module.Progress)[name]
            self.names.set(module.Progress, name, self._followed(method))

    def _followed(self, method: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(method)
        def call(progress: Any, *args: Any, **kwargs: Any) -> object:
            result = method(progress, *args, **kwargs)
            if not progress.disable:
                self._file.write(lambda: _bars(progress), now=progress.finished)
            return result

        return call


def _bars(progress: Any) -> list[Bar]:
    """The bars on display, the outermost first; if all have finished, only the last one."""
    from rich.markup import render

    shown = [task for task in progress.tasks if task.visible]
    running = [task for task in shown if not task.finished] or shown[-1:]
    return [
        Bar(
            render(task.description).plain.strip(),
            int(task.completed),
            None if task.total is None else int(task.total),
        )
        for task in running
    ]
