"""Tab completion in the option line of a magic: options, their choices, and ids of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.kernel.options import PARSERS, MagicParser
from tpunb.runs import directory
from tpunb.utils.completion import complete

MOST = 50
"""Number of newest runs that are offered."""


def run_ids(folder: Path) -> list[str]:
    """Return the ids of the newest runs in a folder, newest first."""
    return [run.id for run in directory.list_runs(folder)[: -MOST - 1 : -1]]


def register_completers(shell: InteractiveShell, runs: Callable[[], Path]) -> None:
    """Register completion of the magics' options. `runs` returns the folder of the runs."""
    for parser in PARSERS:
        shell.set_hook("complete_command", _completer(parser, runs), str_key=parser.prog)


def unregister_completers(shell: InteractiveShell) -> None:
    """Undo `register_completers`. IPython has no call for it."""
    commands = shell.strdispatchers["complete_command"].strs
    for parser in PARSERS:
        commands.pop(parser.prog, None)


def _completer(
    parser: MagicParser[Any], runs: Callable[[], Path]
) -> Callable[[object, Any], list[str]]:
    def offer(shell: object, event: Any) -> list[str]:
        before: str = event.text_until_cursor
        words = before.split()[1:]
        start = words.pop() if words and not before[-1:].isspace() else ""
        values: dict[str, Callable[[], Iterable[str]]] = {"RUN": lambda: run_ids(runs())}
        return complete(parser, words, start, values)

    return offer
