"""Options as frozen dataclasses: declared once, for the parser, its help, the docs and mypy.

    @dataclass(frozen=True)
    class StopOptions:
        run: str | None = argument("RUN", help="an id or any part of it (default: the latest)")
        now: bool = flag("--now", help="do not wait for the ranks to save")

    parser = OptionParser(prog="stop")
    add_options(parser, StopOptions)
    options = build_options(StopOptions, parser.parse_args(words))

`options.now` is a bool that mypy knows; `options.nwo` is an error before anything runs.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar

_Options = TypeVar("_Options")


@dataclass(frozen=True)
class Declaration:
    """What the parser and the docs need to know about a field."""

    names: tuple[str, ...]
    """`("-y", "--yes")`; empty for a positional argument."""
    help: str
    group: str
    """Its heading in `--help`; '' for the first heading."""
    exclusive: bool
    """True if it excludes the other exclusive options of its group."""
    keywords: Mapping[str, Any]
    """Further arguments of `add_argument`."""


def option(
    *names: str,
    help: str,
    default: Any = None,
    type: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | tuple[str, ...] | None = None,
    repeatable: bool = False,
    group: str = "",
    exclusive: bool = False,
    alone: str | None = None,
    required: bool = False,
) -> Any:
    """Declare a field for an option with a value.

    `repeatable`: the field is a tuple of all values. `alone`: the value of the option if it is
    given without one. `metavar` with several names: the option takes that many values. `default`
    may be a function, which is called when the parser is made.
    """
    keywords: dict[str, Any] = {"type": type, "choices": choices, "metavar": metavar}
    if repeatable:
        keywords["action"] = "append"
    if isinstance(metavar, tuple):
        keywords["nargs"] = len(metavar)
    if required:
        keywords["required"] = True
    if alone is not None:
        keywords |= {"nargs": "?", "const": alone}
    keywords = {name: value for name, value in keywords.items() if value is not None}
    declared = Declaration(names, help, group, exclusive, keywords)
    if callable(default):
        return field(default_factory=default, metadata={"option": declared})
    return field(default=() if repeatable else default, metadata={"option": declared})


def flag(*names: str, help: str, group: str = "", exclusive: bool = False) -> Any:
    """Declare a field for an option without a value: True if it is given, otherwise False."""
    declared = Declaration(names, help, group, exclusive, {"action": "store_true"})
    return field(default=False, metadata={"option": declared})


def argument(
    metavar: str,
    help: str,
    *,
    required: bool = False,
    several: bool = False,
    type: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a field for a positional argument; None if it is optional and missing.

    `several`: the field is a tuple of at least one argument.
    """
    keywords: dict[str, Any] = {"metavar": metavar}
    if several:
        keywords["nargs"] = "+"
    elif not required:
        keywords["nargs"] = "?"
    if type is not None:
        keywords["type"] = type
    declared = Declaration((), help, "", False, keywords)
    return field(default=None, metadata={"option": declared})


def declarations(options: type) -> list[tuple[Field[Any], Declaration]]:
    """Return the fields of an options class with their declarations, in order."""
    return [
        (item, item.metadata["option"]) for item in fields(options) if "option" in item.metadata
    ]


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add all options of a class to a parser, each under the heading of its group."""
    groups = {group.title: group for group in parser._action_groups}
    exclusive: dict[str, argparse._ActionsContainer] = {}
    for item, declared in declarations(options):
        keywords = dict(declared.keywords)
        if not declared.names:
            parser.add_argument(item.name, help=declared.help, **keywords)
            continue
        place: argparse._ActionsContainer = parser
        if declared.group:
            if declared.group not in groups:
                groups[declared.group] = parser.add_argument_group(declared.group)
            place = groups[declared.group]
        if declared.exclusive:
            if declared.group not in exclusive:
                exclusive[declared.group] = place.add_mutually_exclusive_group()
            place = exclusive[declared.group]
        default = item.default
        if item.default_factory is not MISSING:
            default = item.default_factory()
        if keywords.get("action") == "append":
            default = None  # argparse would append to a default list
        place.add_argument(
            *declared.names, dest=item.name, default=default, help=declared.help, **keywords
        )


def build_options(options: type[_Options], namespace: argparse.Namespace) -> _Options:
    """Build the options from the namespace of a parser with `add_options(parser, options)`."""
    values = {}
    for item, declared in declarations(options):
        value = getattr(namespace, item.name)
        if declared.keywords.get("action") == "append":
            value = tuple(tuple(v) if isinstance(v, list) else v for v in value or ())
        elif declared.keywords.get("nargs") == "+":
            value = tuple(value)
        values[item.name] = value
    return options(**values)


class OptionParser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest known option for an unknown one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but report unknown arguments in this parser, also of a subcommand.

        argparse reports them in the main parser, which does not know the subcommand's options.
        """
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        return namespace, unknown

    def _suggestion(self, unknown: Sequence[str]) -> str:
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        known = [name for action in shown for name in action.option_strings]
        for word in unknown:
            if word.startswith("--"):
                nearest = difflib.get_close_matches(word.partition("=")[0], known, 1, 0.7)
                if nearest:
                    return f"; did you mean {nearest[0]}?"
        if "--returns" in known and not unknown[0].startswith("-"):
            return "; separate names with commas, as in --returns a,b"
        return ""


def join_lists(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Join the words of lists, so that `--returns a, b` is one value like `--returns a,b`."""
    joined: list[str] = []
    option = ""
    for word in words:
        if word.startswith("-"):
            option = word.partition("=")[0]
        last = joined[-1] if joined else ""
        goes_on = last not in ("", option) and (last.endswith(",") or word.startswith(","))
        if goes_on and option in options and not word.startswith("-"):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def parse_count(text: str) -> int:
    """Parse a whole number from 0 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([smh]?)", re.ASCII)
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Parse a duration to seconds: 90 for `90` or `90s`, 300 for `5m`, 32400 for `9h`.

    Raises ArgumentTypeError.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration such as 90, 90s, 5m or 9h (without a unit: seconds)"
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_rank_list(text: str) -> str:
    """Check the form of `all`, `none` or a list such as `0,3-5`; its ranks are checked with a run.

    Raises ArgumentTypeError.
    """
    if not re.fullmatch(r"all|none|\d+(-\d+)?(,\d+(-\d+)?)*", text.replace(" ", ""), re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not name ranks: use all, none, or a list such as 0,3-5"
        )
    return text
