"""The table of rules: YAML files beside this module, read and checked once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, Literal, get_args

from tpunb.diagnosis.finding import Facts
from tpunb.diagnosis.patterns import LinePattern, PatternError
from tpunb.errors import TpunbError

Kind = Literal["cause", "symptom", "slow"]
_CONFIDENCE = {"cause": 0.9, "symptom": 0.5, "slow": 0.7}
_FACTS = {field.name for field in fields(Facts)}
_RULE_KEYS = {"id", "kind", "stage", "cause", "fix", "source", "versions", "patterns"}
_RULE_OPTIONAL = {"explains", "confidence"}
_SIGN_KEYS = {"text", "with", "without", "exit", "failed", "last", "facts", "report", "confidence"}
_REPORT_KEYS = {"compiles", "executions", "compile_seconds", "share", "share_below"}


class RuleError(TpunbError):
    """A rule that cannot be used: which one, in which file, and what is wrong with it."""

    def __init__(self, file: str, rule: str, reason: str) -> None:
        super().__init__(file, rule, reason)
        self.file, self.rule, self.reason = file, rule, reason

    def __str__(self) -> str:
        return f"{self.file}: rule {self.rule}: {self.reason}"


@dataclass(frozen=True)
class Sign:
    """One way in which a cause shows itself: everything given must hold."""

    confidence: float
    text: LinePattern | None = None
    """On a line of the log."""
    also: tuple[LinePattern, ...] = ()
    """`with`: on some line, each of them."""
    without: tuple[LinePattern, ...] = ()
    """On no line, any of them."""
    exit: frozenset[str] = frozenset()
    """A process ended with one of these: 'SIGKILL', '17'."""
    last: bool = False
    """`text` on the last line, and nothing after it."""
    failed: bool = False
    """Only if the run is known to have failed."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Values of Facts."""
    report: Mapping[str, float] = field(default_factory=dict)
    """Bounds on the numbers of a metrics report: at least, but `share_below`."""


@dataclass(frozen=True)
class Rule:
    """A cause, how it is recognised, and what to do."""

    id: str
    kind: Kind
    """A symptom has a cause that other lines may name: it steps back behind every cause.

    What makes a run slow, or never end, does not end it: it steps back behind both.
    """
    stage: str
    cause: str
    fix: str
    source: str
    versions: str
    signs: tuple[Sign, ...]
    explains: frozenset[str]
    """Rules that step back when this one holds."""


@functools.cache
def rules() -> tuple[Rule, ...]:
    """The rules of this package. RuleError if one is wrong."""
    folder = resources.files("tpunb.diagnosis") / "rules"
    found = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return read_rules({name: (folder / name).read_text(encoding="utf-8") for name in found})


def read_rules(files: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules in these texts by file name. RuleError names the first that is wrong."""
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
                raise RuleError(file, rule.id, f"there is one of this id in {table[rule.id][0]}")
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
    for key in ("id", "stage", "cause", "fix", "source", "versions"):
        if not isinstance(entry[key], str) or not entry[key].strip():
            raise wrong(f"{key} must be text")
    if entry["kind"] not in get_args(Kind):
        raise wrong(f"kind must be cause, symptom or slow, not {entry['kind']!r}")
    if not entry["source"].startswith("https://"):
        raise wrong("source must be an https address")
    if not isinstance(entry["patterns"], list) or not entry["patterns"]:
        raise wrong("patterns must be a list with at least one")
    confidence = entry.get("confidence", _CONFIDENCE[entry["kind"]])
    try:
        signs = tuple(_sign(sign, confidence) for sign in entry["patterns"])
    except (PatternError, TypeError, ValueError) as error:
        raise wrong(str(error)) from error
    return Rule(
        entry["id"],
        entry["kind"],
        entry["stage"],
        " ".join(entry["cause"].split()),
        " ".join(entry["fix"].split()),
        entry["source"],
        entry["versions"],
        signs,
        frozenset(entry.get("explains", ())),
    )


def _sign(entry: Any, confidence: float) -> Sign:
    """One entry of `patterns`. ValueError if it is wrong."""
    if isinstance(entry, str):
        entry = {"text": entry}
    if unknown := sorted(set(entry) - _SIGN_KEYS):
        raise ValueError(f"a pattern has unknown keys: {', '.join(unknown)}")
    if not {"text", "exit", "facts", "report"} & set(entry):
        raise ValueError("a pattern needs text, exit, facts or report")
    facts = entry.get("facts", {})
    if unknown := sorted(set(facts) - _FACTS):
        raise ValueError(f"a pattern asks for unknown facts: {', '.join(unknown)}")
    report = entry.get("report", {})
    if unknown := sorted(set(report) - _REPORT_KEYS):
        raise ValueError(f"a pattern asks the metrics report for {', '.join(unknown)}")
    sure = float(entry.get("confidence", confidence))
    if not 0 < sure <= 1:
        raise ValueError(f"confidence must be above 0 and at most 1, not {sure}")
    return Sign(
        sure,
        LinePattern.of(entry["text"]) if "text" in entry else None,
        _lines(entry.get("with", ())),
        _lines(entry.get("without", ())),
        frozenset(str(code) for code in entry.get("exit", ())),
        bool(entry.get("last", False)),
        bool(entry.get("failed", False)),
        facts,
        report,
    )


def _lines(sources: str | Iterable[str]) -> tuple[LinePattern, ...]:
    return tuple(
        LinePattern.of(text) for text in ([sources] if isinstance(sources, str) else sources)
    )
