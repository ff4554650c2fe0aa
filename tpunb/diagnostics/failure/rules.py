"""The table of rules: the YAML files in `rules/`, read and checked once.

docs/diagnose.md describes the keys of a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, Literal, get_args

from tpunb.diagnostics.failure.facts import Facts
from tpunb.diagnostics.failure.log import LinePattern, PatternError, compile_pattern
from tpunb.machine import packages
from tpunb.utils.errors import TpunbError

Kind = Literal["cause", "symptom", "slow"]
Stage = Literal[
    "install",
    "notebook",
    "import",
    "cloud",
    "start",
    "data",
    "step",
    "compile",
    "memory",
    "collective",
    "checkpoint",
]
"""How far a run got, in order. A failed install or start does not cause a failure after it."""
_CONFIDENCE = {"cause": 0.9, "symptom": 0.5, "slow": 0.7}
Place = Literal["any", "colab", "kaggle", "gcp"]
"""The platform for which a fix is meant; `any` if no other matches."""
_LONGEST = 110
"""Maximal number of characters of a pattern."""
_FACTS = {field.name for field in fields(Facts)} | {"memory_full", "host_lost"}
_RULE_KEYS = {"id", "kind", "stage", "cause", "fix", "source", "versions", "signs"}
_RULE_OPTIONAL = {"explains", "confidence", "harmless", "library", "mended", "link"}
_LINE_KEYS = {"any", "not", "with", "last", "notices"}
_SIGN_KEYS = _LINE_KEYS | {"exit", "facts", "report", "confidence"}
_REPORT_KEYS = {"compiles", "executions", "compile_seconds", "share", "share_below"}


class RuleError(TpunbError):
    """An invalid rule: its file, its id, and the reason."""

    def __init__(self, file: str, rule: str, reason: str) -> None:
        super().__init__(file, rule, reason)
        self.file, self.rule, self.reason = file, rule, reason

    def __str__(self) -> str:
        return f"{self.file}: rule {self.rule}: {self.reason}"


Line = tuple[LinePattern, ...]
"""One or several patterns that must all match the same line."""


@dataclass(frozen=True)
class Sign:
    """One way to recognise a cause: all conditions that are set must hold."""

    confidence: float
    lines: tuple[Line, ...] = ()
    """`any`: a line that may be a reason matches one of these."""
    unless: tuple[re.Pattern[str], ...] = ()
    """`not`: that line matches none of these."""
    context: tuple[Line, ...] = ()
    """`with`: for each of these, some line anywhere in the log matches."""
    exit: frozenset[str] = frozenset()
    """A process ended with one of these: 'SIGKILL', '17'."""
    last: bool = False
    """True if the line must be the last line of the log."""
    notices: bool = False
    """True if a line that only warns is enough when there is no exception."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Required values of `Facts`."""
    report: Mapping[str, float] = field(default_factory=dict)
    """Lower bounds on the metrics report's numbers; `share_below` is an upper one."""


@dataclass(frozen=True)
class Rule:
    """A cause, the signs by which it is recognised, and the fix."""

    id: str
    kind: Kind
    """A symptom has a cause that other lines may name: it ranks behind every cause.

    A `slow` rule describes why a run is slow or never ends; it is never the reason for a failure.
    """
    stage: Stage
    cause: str
    fixes: Mapping[str, tuple[str, ...]]
    """Steps, keyed by platform: 'any', 'colab', 'kaggle', 'gcp'."""
    source: str
    """Where the failure was reported or documented: the reason for the rule, not shown."""
    link: str
    """A page about exactly this error, to show; '' if there is none."""
    versions: str
    library: str
    """The fix if not the user's code but a library makes the call; '' if it is the same."""
    mended: Mapping[str, str]
    """The first release without the failure, keyed by the library that makes the call."""
    signs: tuple[Sign, ...]
    explains: frozenset[str]
    """Rules of the same kind that rank behind this one if both hold."""
    harmless: tuple[str, ...]
    """Similar lines with another meaning, which no sign may match."""

    def steps(self, platform: str | None) -> tuple[str, ...]:
        """The steps of the fix on this platform, in order."""
        steps = self.fixes.get(platform or "any", self.fixes["any"])
        return tuple(_with_commands(step, platform or "") for step in steps)


def _with_commands(step: str, platform: str) -> str:
    """Replace `{pair}` in a step with the command by which `tpunb doctor` installs torch and
    torch_xla on this platform, `{pair without libtpu}` with that for machines without a TPU.
    """
    for mark, tpu in (("{pair}", True), ("{pair without libtpu}", False)):
        if mark in step:
            have = packages.read_installed()
            pair = packages.best_pair(platform, have.python) or packages.PAIRS[0]
            command = packages.install_command(pair, platform, tpu=tpu, have=have)
            step = step.replace(mark, f"`{command}`")
    return step


@functools.cache
def rules() -> tuple[Rule, ...]:
    """The rules of this package. Raises RuleError if one is invalid."""
    folder = resources.files("tpunb.diagnostics.failure") / "rules"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return read_rules({name: (folder / name).read_text(encoding="utf-8") for name in names})


def read_rules(files: Mapping[str, str]) -> tuple[Rule, ...]:
    """Read rules from texts, keyed by file name. Raises RuleError for the first invalid rule."""
    import yaml  # not needed before something has failed

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    table: dict[str, tuple[str, Rule]] = {}
    for file, text in files.items():
        try:
            entries = yaml.load(text, Loader=loader)
        except yaml.YAMLError as error:
            raise RuleError(file, "?", f"not YAML: {error}") from error
        if not isinstance(entries, list):
            raise RuleError(file, "?", "the file must be a list of rules")
        for entry in entries:
            rule = _rule(file, entry)
            if rule.id in table:
                raise RuleError(file, rule.id, f"{table[rule.id][0]} has a rule of this id")
            table[rule.id] = (file, rule)
    for file, rule in table.values():
        if unknown := sorted(rule.explains - set(table)):
            raise RuleError(file, rule.id, f"explains unknown rules: {', '.join(unknown)}")
    return tuple(rule for _, rule in table.values())


def _rule(file: str, entry: Any) -> Rule:
    name = str(entry.get("id", "?")) if isinstance(entry, dict) else "?"

    def wrong(reason: str) -> RuleError:
        return RuleError(file, name, reason)

    if not isinstance(entry, dict):
        raise wrong(f"must be a mapping, not {entry!r}")
    if missing := sorted(_RULE_KEYS - set(entry)):
        raise wrong(f"lacks {', '.join(missing)}")
    if unknown := sorted(set(entry) - _RULE_KEYS - _RULE_OPTIONAL):
        raise wrong(f"has unknown keys: {', '.join(unknown)}")
    for key in ("id", "cause", "source", "versions"):
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise wrong(f"{key} must be text")
    if entry["kind"] not in get_args(Kind):
        raise wrong(f"kind must be cause, symptom or slow, not {entry['kind']!r}")
    if entry["stage"] not in get_args(Stage):
        raise wrong(f"stage must be one of {', '.join(get_args(Stage))}, not {entry['stage']!r}")
    if not entry["source"].startswith("https://"):
        raise wrong("source must be an https address")
    if not isinstance(entry["signs"], list) or not entry["signs"]:
        raise wrong("signs must be a list with at least one")
    try:
        confidence = float(entry.get("confidence", _CONFIDENCE[entry["kind"]]))
        return Rule(
            entry["id"],
            entry["kind"],
            entry["stage"],
            _plain(entry["cause"]),
            _fixes(entry["fix"]),
            entry["source"],
            entry["source"] if entry.get("link") else "",
            entry["versions"],
            _plain(str(entry.get("library", ""))),
            {str(k): str(v) for k, v in _mapping(entry, "mended").items()},
            tuple(_sign(sign, confidence) for sign in entry["signs"]),
            frozenset(_texts(entry.get("explains", []), "explains")),
            _texts(entry.get("harmless", []), "harmless"),
        )
    except (PatternError, TypeError, ValueError) as error:
        raise wrong(str(error)) from error


def _fixes(entry: Any) -> dict[str, tuple[str, ...]]:
    """A fix: text, a list of steps, or a mapping from platform to either. Raises ValueError."""
    if not isinstance(entry, dict):
        entry = {"any": entry}
    if unknown := sorted(set(entry) - set(get_args(Place))):
        raise ValueError(f"fix is for unknown places: {', '.join(map(str, unknown))}")
    if "any" not in entry:
        raise ValueError("fix lacks any, for places that it does not name")
    fixes = {}
    for place, steps in entry.items():
        fixes[place] = tuple(map(_plain, _texts(steps, "fix")))
        if not all(fixes[place]) or not fixes[place]:
            raise ValueError("fix must be text, or a list of texts")
    return fixes


def _texts(entry: Any, key: str) -> tuple[str, ...]:
    """Text, or a list of texts. Raises ValueError for anything else."""
    texts = entry if isinstance(entry, list) else [entry]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{key} must be text, or a list of texts")
    return tuple(texts)


def _plain(text: str) -> str:
    return " ".join(text.split())


def _sign(entry: Any, confidence: float) -> Sign:
    """One entry of `signs`. Raises ValueError if it is invalid."""
    if isinstance(entry, (str, list)):
        entry = {"any": [entry]}
    if not isinstance(entry, dict):
        raise ValueError(f"a sign is a pattern or a mapping, not {entry!r}")
    if unknown := sorted(set(entry) - _SIGN_KEYS):
        raise ValueError(f"a sign has unknown keys: {', '.join(unknown)}")
    if not {"any", "exit", "facts", "report"} & set(entry):
        raise ValueError("a sign needs any, exit, facts or report")
    if "any" not in entry and {"not", "last", "notices"} & set(entry):
        raise ValueError("not, last and notices of a sign need any")
    facts, report = _mapping(entry, "facts"), _mapping(entry, "report")
    if unknown := sorted(set(facts) - _FACTS):
        raise ValueError(f"a sign requires unknown facts: {', '.join(unknown)}")
    if unknown := sorted(set(report) - _REPORT_KEYS):
        raise ValueError(f"a sign uses unknown keys of report: {', '.join(unknown)}")
    exits = entry.get("exit", [])
    if not isinstance(exits, list):
        raise ValueError(f"exit must be a list, such as [SIGKILL, 17], not {exits!r}")
    sure = float(entry.get("confidence", confidence))
    if not 0 < sure <= 1:
        raise ValueError(f"confidence must be above 0 and at most 1, not {sure}")
    return Sign(
        sure,
        _lines(entry, "any"),
        tuple(map(compile_pattern, _patterns(entry.get("not", []), "not"))),
        _lines(entry, "with"),
        frozenset(map(str, exits)),
        bool(entry.get("last", False)),
        bool(entry.get("notices", False)),
        facts,
        report,
    )


def _mapping(entry: Any, key: str) -> dict[str, Any]:
    value = entry.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a mapping, not {value!r}")
    return value


def _lines(entry: Any, key: str) -> tuple[Line, ...]:
    """A pattern, or a list whose items are patterns or lists of patterns for the same line."""
    items = entry.get(key, [])
    items = items if isinstance(items, list) else [items]
    return tuple(tuple(map(LinePattern.compile, _patterns(item, key))) for item in items)


def _patterns(entry: Any, key: str) -> tuple[str, ...]:
    """Patterns. Raises ValueError if one is too long for a person to review."""
    if not (texts := _texts(entry, key)) and key == "any":
        raise ValueError("a list of patterns is empty")
    for source in texts:
        if len(source) > _LONGEST:
            raise ValueError(f"{source!r} is longer than {_LONGEST} characters: make it a list")
    return texts
