"""The search space of a sweep: lists of values, and ranges from which values are drawn."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpunb.notebook import parameters
from tpunb.utils.errors import TpunbError

_RANGE = re.compile(r"(?P<low>[^:,]+?)\.\.(?P<high>[^:,]+?)(?P<log>:log)?")
_INT = re.compile(r"[+-]?\d+")
MOST = 10_000
"""Maximum number of trials: a larger grid would be a range that was meant for --space."""


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    def draw(self, source: random.Random) -> Any:
        return source.choice(self.values)

    def to_json(self) -> Any:
        return list(self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if both are integers."""

    low: float
    high: float
    log: bool = False
    """True to draw uniformly on a logarithmic scale."""

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def draw(self, source: random.Random) -> float:
        if not self.log:
            if self.whole:
                return source.randint(int(self.low), int(self.high))
            return source.uniform(self.low, self.high)
        if self.whole:  # as in Optuna: each integer has the interval of ±0.5 around it
            number = math.exp(source.uniform(math.log(self.low - 0.5), math.log(self.high + 0.5)))
            return min(max(round(number), int(self.low)), int(self.high))
        number = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return min(max(number, self.low), self.high)

    def to_json(self) -> Any:
        return {"low": self.low, "high": self.high, "log": self.log}


Space = Mapping[str, Choice | Range]
"""Values of each parameter, by name."""


def assignment(text: str) -> tuple[str, str]:
    """Split NAME=VALUES. Raises ValueError."""
    name, equals, values = text.partition("=")
    if not (equals and name.strip().isidentifier() and values.strip()):
        raise ValueError(f"{text!r} is not of the form NAME=VALUES")
    return name.strip(), values.strip()


def by_name(given: Iterable[tuple[str, str]], option: str) -> dict[str, str]:
    """Return the values of a repeatable option, by name. Raises TpunbError for a repeated name."""
    found: dict[str, str] = {}
    for name, text in given:
        if name in found:
            raise TpunbError(f"{option} {name} is given twice; write {option} {name}=V,V")
        found[name] = text
    return found


def parse_grid(name: str, text: str, known: Mapping[str, Any], option: str = "--grid") -> Choice:
    """Parse values separated by commas, and ranges of integers such as `0..4`.

    `known`: the defaults of the notebook's parameters. Raises TpunbError.
    """
    values: list[Any] = []
    for part in _split(text):
        first, dots, last = part.partition("..")
        if dots and _INT.fullmatch(first) and _INT.fullmatch(last):
            if int(last) - int(first) >= MOST:
                raise TpunbError(f"{option} {name}={part}: more than {MOST:,} values")
            numbers = range(int(first), int(last) + 1)
            if not numbers:
                raise TpunbError(f"{option} {name}={part}: the first number must be the lower one")
            values += (parameters.typed(name, number, known, option) for number in numbers)
        elif dots and not isinstance(known.get(name), str) and _is_number(first, last):
            raise TpunbError(
                f"{option} {name}={part}: `..` is only for integers; write {option} "
                f"{name}={first},…,{last}, or --space {name}={part} with --random N"
            )
        else:
            values.append(_plain(name, parameters.typed_text(name, part, known, option)))
    if not values:
        raise TpunbError(f"{option} {name}={text} has no values")
    return Choice(unique(values))


def _is_number(*texts: str) -> bool:
    return all(type(parameters.parameter(text)) in (int, float) for text in texts)


def parse_space(name: str, text: str, known: Mapping[str, Any]) -> Choice | Range:
    """Parse `1e-5..1e-2`, `1e-5..1e-2:log`, `1..8`, or values separated by commas."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return parse_grid(name, text, known, "--space")
    low, high = (parameters.parameter(match[end]) for end in ("low", "high"))
    return make_range(name, low, high, log=match["log"] is not None, known=known)


def make_range(name: str, low: Any, high: Any, *, log: bool, known: Mapping[str, Any]) -> Range:
    """Make a range, with its ends checked against the notebook's parameter. Raises TpunbError."""
    option = "--space"
    text = f"{option} {name}={low}..{high}{':log' if log else ''}"
    numbers = [value for value in (low, high) if type(value) in (int, float)]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)):
        raise TpunbError(f"{text}: the ends of a range must be numbers")
    if not low < high:
        raise TpunbError(f"{text}: the first number must be the lower one")
    if log and low <= 0:
        raise TpunbError(f"{text}: a logarithmic range must begin above 0")
    low, high = (parameters.typed(name, value, known, option) for value in (low, high))
    if not (type(low) is type(high) is int):
        low, high = float(low), float(high)
    return Range(low, high, log)


def from_python(
    grid: Mapping[str, Any], space: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Choice | Range]:
    """Make a space from Python values or texts of options.

    Values are lists, or ranges such as "1e-5..1e-2:log" or (1e-5, 1e-2, "log"). Raises TpunbError.
    """
    made: dict[str, Choice | Range] = {}
    for name, values in grid.items():
        if isinstance(values, str):
            made[name] = parse_grid(name, values, known)
        else:
            made[name] = listed(name, values, known, "grid")
    for name, values in space.items():
        if name in made:
            raise TpunbError(f"{name} is both in the grid and in the space: remove it from one")
        if isinstance(values, str):
            made[name] = parse_space(name, values, known)
        elif isinstance(values, tuple) and len(values) in (2, 3):
            made[name] = make_range(
                name, values[0], values[1], log="log" in values[2:], known=known
            )
        else:
            made[name] = listed(name, values, known, "space")
    return made


def listed(name: str, values: object, known: Mapping[str, Any], argument: str) -> Choice:
    """Make a choice from an iterable. Raises TpunbError for another object or a wrong type.

    `argument`: "grid" or "space", for errors.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, Mapping)):
        raise TpunbError(f"{argument} of {name}: {values!r} is not a list of values")
    plain = [_plain(name, value) for value in values]
    if not plain:
        raise TpunbError(f"{argument} of {name}: the list has no values")
    return Choice(unique([parameters.typed(name, value, known, argument) for value in plain]))


def _plain(name: str, value: Any) -> Any:
    """Convert a value to a type that papermill can write into a cell, numpy's numbers included."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        value = item()
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, inner) for inner in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(name, inner) for key, inner in value.items()}
    raise TpunbError(
        f"{name}={value!r}: a parameter must be a number, a string, a boolean, None, or a list or "
        "dict of these"
    )


def plain_trial(trial: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Check and convert the parameters of one trial of a list. Raises TpunbError."""
    return {
        name: parameters.typed(name, _plain(name, value), known, "trials")
        for name, value in trial.items()
    }


def unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values without duplicates, in order."""
    kept: list[Any] = []
    for value in values:
        if not any(type(value) is type(other) and value == other for other in kept):
            kept.append(value)
    return tuple(kept)


def grid_trials(space: Space) -> list[dict[str, Any]]:
    """Return all combinations, the last parameter changing first. Raises TpunbError for a range."""
    lists: list[Sequence[Any]] = []
    for name, values in space.items():
        if isinstance(values, Range):
            raise TpunbError(
                f"--space {name}: a range needs a number of trials: --random N or --search N"
            )
        lists.append(values.values)
    count = math.prod(map(len, lists))
    if count > MOST:
        raise TpunbError(
            f"the grid has {count:,} trials, more than {MOST:,}: draw N of them with --random N"
        )
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*lists)]


def random_trials(space: Space, seed: str) -> Iterator[dict[str, Any]]:
    """Yield different trials, the same ones for the same seed, until all are used up."""
    seen: set[str] = set()
    source = random.Random(seed)
    missed = 0
    while missed < 1000:
        trial = {name: values.draw(source) for name, values in space.items()}
        if repr(trial) in seen:
            missed += 1
            continue
        missed = 0
        seen.add(repr(trial))
        yield trial


def _split(text: str) -> list[str]:
    """Split a text at commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += sign
    return [part.strip() for part in parts if part.strip()]
