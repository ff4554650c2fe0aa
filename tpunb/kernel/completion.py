"""Tab completion in the option line of a magic: options, their choices, and ids of runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

from tpunb.kernel.options import PARSERS, MagicParser
from tpunb.runs import directory

MOST = 50
"""Number of newest runs that are offered."""


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
        return complete(parser, words, start, runs)

    return offer


def complete(
    parser: argparse.ArgumentParser, words: Sequence[str], start: str, runs: Callable[[], Path]
) -> list[str]:
    """Return the words that begin with `start` and may follow `words`: options, choices, runs.

    There are none for free text and file names.
    """
    positional = [action for action in parser._actions if not action.option_strings]
    before: argparse.Action | None = None
    """The option whose value is next."""
    for word in words:
        if before is not None:
            before = None
        elif word.startswith("-"):
            action = parser._option_string_actions.get(word)
            before = action if action is not None and action.nargs != 0 else None
        else:
            positional = positional[1:]
    if before is not None:
        found = _values(before, runs)
    elif start.startswith("-"):
        found = _options(parser, words)
    else:
        found = _values(positional[0], runs) if positional else []
        found = [*found, *(_options(parser, words) if not start else [])]
    return [word for word in found if word.startswith(start)]


def _values(action: argparse.Action, runs: Callable[[], Path]) -> list[str]:
    if action.choices is not None:
        return list(map(str, action.choices))
    if action.metavar != "RUN":
        return []
    return [run.id for run in directory.list_runs(runs())[: -MOST - 1 : -1]]


def _options(parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """Return the long names of options, except given ones that cannot be repeated."""
    return [
        action.option_strings[-1]
        for action in parser._actions
        if action.option_strings
        and action.help is not argparse.SUPPRESS
        and (isinstance(action, argparse._AppendAction) or not {*given} & {*action.option_strings})
    ]
