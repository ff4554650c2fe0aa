"""Completions of a command line or an option line, from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence

Values = Mapping[str, Callable[[], Iterable[str]]]
"""Functions that return the possible values of an argument, by its metavar."""


def complete(
    parser: argparse.ArgumentParser, words: Sequence[str], start: str, values: Values
) -> list[str]:
    """Return the words that begin with `start` and may follow `words`: options, commands, values.

    There are none for free text and file names.
    """
    given: set[str] = set()
    positional = [action for action in parser._actions if not action.option_strings]
    before: argparse.Action | None = None
    """The option whose value is next."""
    for index, word in enumerate(words):
        if before is not None:
            before = None
        elif word.startswith("-"):
            given.add(word)
            action = parser._option_string_actions.get(word)
            before = action if action is not None and action.nargs != 0 else None
        elif positional:
            first = positional[0]
            if isinstance(first, argparse._SubParsersAction):
                command = first.choices.get(word)
                return (
                    [] if command is None else complete(command, words[index + 1 :], start, values)
                )
            if first.nargs not in ("*", "+"):
                positional = positional[1:]
    if before is not None:
        found = _values(before, values)
    elif start.startswith("-"):
        found = _options(parser, given)
    else:
        found = _values(positional[0], values) if positional else []
        found = [*found, *(_options(parser, given) if not start else [])]
    return [word for word in found if word.startswith(start)]


def _values(action: argparse.Action, values: Values) -> list[str]:
    if action.choices is not None:
        return list(map(str, action.choices))
    known = values.get(action.metavar) if isinstance(action.metavar, str) else None
    return [] if known is None else list(known())


def _options(parser: argparse.ArgumentParser, given: set[str]) -> list[str]:
    """Return the long names of options, except given ones that cannot be repeated."""
    return [
        action.option_strings[-1]
        for action in parser._actions
        if action.option_strings
        and action.help is not argparse.SUPPRESS
        and (isinstance(action, argparse._AppendAction) or not given & {*action.option_strings})
    ]
