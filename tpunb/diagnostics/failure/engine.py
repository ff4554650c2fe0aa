"""Applies the table of rules to a log and to other facts about a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpunb.diagnostics.failure.evidence import EXCEPTION, PossibleReasons
from tpunb.diagnostics.failure.facts import Facts, exit_name
from tpunb.diagnostics.failure.log import Log
from tpunb.diagnostics.failure.rules import FailureRule, Line, Sign, rules
from tpunb.runs.result import Causes, Diagnosis, Evidence
from tpunb.runs.spec import RunState
from tpunb.utils.text import excerpt

_MOST = 5
"""Maximal number of causes in an answer."""
_LINES = 4
"""Maximal number of different lines of evidence for a cause."""
_HITS = 64
"""Maximal number of matching lines that are considered as evidence."""
_STEP_BACK = 0.4
"""Factor on the confidence of a cause that another one explains."""
_SURE = 0.7
"""Causes of at least this confidence are ordered by time: the first in the log wins."""


def diagnose(
    text: str,
    returncode: int | None = None,
    *,
    facts: Facts | None = None,
    table: Sequence[FailureRule] | None = None,
) -> list[Diagnosis]:
    """Return the known causes for which a log contains evidence, the most likely first.

    A cause needs evidence in the exception that ended a rank, in a fatal line, or in how a process
    ended. Warnings are never the reason for a failure.

    Args:
        text: The log of one run with all its ranks. Colours, progress bars, rank prefixes and
            Kaggle's JSON form of logs are handled.
        returncode: How the process ended; negative or above 128 for a signal. With 0 there is
            no cause, whatever the log contains. None: unknown.
        facts: Other facts about the run; none by default.
        table: The rules; those of this package by default.

    Returns:
        At most five, best first; empty if no cause is known (see `most_relevant_lines`).
    """
    facts = facts or Facts()
    if returncode == 0 or facts.state == RunState.SUCCEEDED:
        return []
    seen = _Seen(text, returncode, facts)
    return Causes(_rank(seen.matches(rules() if table is None else table), seen))


@dataclass(frozen=True)
class _Match:
    rule: FailureRule
    confidence: float
    lines: tuple[int, ...]
    first: int
    """The first of the lines; one beyond the end of the log if there is no line."""
    evidence: tuple[Evidence, ...]


class _Seen:
    """The observations of a run: its log, its facts, and how its processes ended."""

    def __init__(self, text: str, returncode: int | None, facts: Facts) -> None:
        recorded = "\n\n".join(facts.exceptions)
        self.log = Log(f"{text}\n\n{recorded}" if recorded else text)
        start = len(self.log.lines) - len(Log(recorded).lines) if recorded else None
        self.reasons = PossibleReasons(self.log, start)
        self.facts = facts
        self.exits: dict[str, tuple[int, ...]] = {}
        """Ranks, keyed by how they ended ('SIGKILL', '17'); an empty tuple for the run itself."""
        if returncode:
            self.exits[exit_name(returncode)] = ()
        for rank, code in sorted(facts.exits.items()):
            if code:
                name = exit_name(code)
                self.exits[name] = (*self.exits.get(name, ()), rank)

    def matches(self, table: Sequence[FailureRule]) -> list[_Match]:
        backend = self.facts.backend
        known = [rule for rule in table if backend is None or backend in rule.backends]
        found = [match for rule in known if (match := self.match(rule)) is not None]
        explained = {number for match in found for number in match.lines}
        if self.reasons.unexplained(explained):
            # That exception is shown anyway, and explains more than the ends of other processes.
            fatal = self.reasons.fatal
            found = [m for m in found if m.rule.kind == "cause" or not fatal.isdisjoint(m.lines)]
        return found

    def match(self, rule: FailureRule) -> _Match | None:
        """Return the rule with all its evidence; None if there is none."""
        best = 0.0
        lines: set[int] = set()
        ends: dict[str, None] = {}
        for sign in rule.signs:
            matching = self.lines_of(sign)
            if (sign.lines and not matching) or not self.holds(sign):
                continue
            best = max(best, sign.confidence)
            lines.update(matching)
            ends.update(dict.fromkeys(name for name in self.exits if name in sign.exit))
        if not best:
            return None
        ordered = tuple(sorted(lines))
        evidence = _evidence(ordered, self.log) + [
            Evidence(f"ended with {n}" if n.isdigit() else f"ended by {n}", self.exits[n])
            for n in ends
        ]
        first = ordered[0] if ordered else len(self.log.lines)
        return _Match(rule, best, ordered, first, tuple(evidence[:_LINES]))

    def lines_of(self, sign: Sign) -> list[int]:
        """Return the lines that may be a reason and match one of the sign's patterns."""
        among = self.reasons.candidates.find
        found = sorted({number for line in sign.lines for number in self.all_of(line, among)})
        bodies = self.log.bodies
        kept = [n for n in found if not any(one.search(bodies[n]) for one in sign.unless)]
        return kept[:_HITS]

    def all_of(self, line: Line, find: Callable[[re.Pattern[str]], list[int]]) -> list[int]:
        """Return the numbers of the lines that match all of these patterns."""
        first, *others = line
        bodies = self.log.bodies
        return [n for n in find(first) if all(one.search(bodies[n]) for one in others)]

    def holds(self, sign: Sign) -> bool:
        """True if every condition of the sign holds, apart from that on its lines."""
        if sign.exit and not sign.exit & set(self.exits):
            return False
        if any(getattr(self.facts, name) != value for name, value in sign.facts.items()):
            return False
        return all(self.all_of(line, self.log.all.find) for line in sign.context)


def _evidence(numbers: Sequence[int], log: Log) -> list[Evidence]:
    """The lines as evidence; equal lines of several ranks are combined."""
    ranks: dict[str, list[int]] = {}
    cells: dict[str, int | None] = {}
    for number in numbers:
        line = log.bodies[number].strip()
        if line not in ranks:
            if len(ranks) == _LINES:
                continue
            ranks[line], cells[line] = [], log.cell(number)
        rank = log.rank(number)
        if rank is not None and rank not in ranks[line]:
            ranks[line].append(rank)
    return [Evidence(excerpt(line, 400), tuple(sorted(ranks[line])), cells[line]) for line in ranks]


def _rank(matches: Sequence[_Match], seen: _Seen) -> list[Diagnosis]:
    """First the causes that no other explains, the sure ones in order of time; then the others."""
    facts = seen.facts
    kinds = {match.rule.kind for match in matches}
    explained = {
        other
        for match in matches
        for other in match.rule.explains
        if match.rule.kind == "cause" or "cause" not in kinds
    }
    # Of two that explain each other, neither ranks behind.
    by_id = {match.rule.id: match.rule for match in matches}
    explained -= {
        one.id
        for one in by_id.values()
        for other in one.explains & by_id.keys()
        if one.id in by_id[other].explains
    }

    def weight(match: _Match) -> float:
        rule = match.rule
        behind = (
            rule.id in explained
            or (rule.kind == "symptom" and "cause" in kinds)
            or (rule.at_start and facts.trained)
        )
        return match.confidence * (_STEP_BACK if behind else 1)

    def order(match: _Match) -> tuple[float, int, float]:
        sure = min(weight(match), _SURE)
        return (-sure, match.first, -match.confidence)

    ordered = sorted(matches, key=order)[:_MOST]
    answers: list[Diagnosis] = []
    ceiling = 1.0
    for match in ordered:
        rule, ceiling = match.rule, min(ceiling, weight(match))
        steps = rule.steps(facts.platform, facts.backend)
        fix, sure = " ".join(steps), round(ceiling, 2)
        answers.append(Diagnosis(rule.id, rule.cause, fix, match.evidence, sure, rule.link, steps))
    if answers and (observed := facts.observations(at_start=ordered[0].rule.at_start)):
        evidence = (*map(Evidence, observed), *answers[0].evidence)
        answers[0] = replace(answers[0], evidence=evidence)
    return answers


# The most informative lines, for logs that no rule matches

_FATAL = re.compile(
    r"^F\d{4} |^\S+ \S+: F |\bCheck fail(?:ed|ure)\b|terminate called|what\(\): "
    r"|Segmentation fault|SIGSEGV|SIGABRT|SIGBUS|core dumped|\bFatal\b|\bpanic\b"
    r"|^\*\*\* Aborted|\b[A-Z_]*(?:EXHAUSTED|INTERNAL|UNAVAILABLE|PRECONDITION|UNKNOWN): "
)
_KILLED = re.compile(r"^(?:.*: )?Killed(?:\s+\S+)?$|exit(?:ed)? (?:with )?(?:code|status) [1-9]")
_LONGEST = 400
"""Number of characters of a line that are read."""
_SCANNED = 20_000
"""Number of lines that are read, from the end of a log: failures come last."""


def most_relevant_lines(text: str, most: int = 8) -> list[str]:
    """Return the most informative lines of a failed run's log, in order.

    For failures that no rule matches: exceptions and fatal lines of native code are preferred to
    lines that mention an error; if there are none of these, the last lines.
    """
    log = Log(text)
    start = max(0, len(log.lines) - _SCANNED)
    weights: dict[str, tuple[int, int]] = {}
    for number in range(start, len(log.lines)):
        line = log.bodies[number][:_LONGEST].rstrip()
        weight = _weight(line)
        if weight and line.strip() not in weights:
            weights[line.strip()] = (weight, number)
    # The highest weights; among equals the first line, which is closest to the cause.
    best = sorted(weights.items(), key=lambda item: (-item[1][0], item[1][1]))[:most]
    if best:
        return [excerpt(line, 300) for line, _ in sorted(best, key=lambda item: item[1][1])]
    last = [line.strip() for line in log.lines[start:] if line.strip()]
    return [excerpt(line, 300) for line in last[-most:]]


def _weight(line: str) -> int:
    if EXCEPTION.match(line) or _FATAL.search(line):
        return 3
    if _KILLED.search(line):
        return 2
    lowered = line.lower()
    return 1 if "error" in lowered or "failed" in lowered else 0
