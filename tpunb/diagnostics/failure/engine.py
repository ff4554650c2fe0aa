"""Applies the table of rules to a log and to other facts about a run."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tpunb.diagnostics.failure.details import texts
from tpunb.diagnostics.failure.evidence import PossibleReasons
from tpunb.diagnostics.failure.facts import Facts, exit_name
from tpunb.diagnostics.failure.log import LinePattern, Log
from tpunb.diagnostics.failure.origin import Origin
from tpunb.diagnostics.failure.rules import FailureRule, Line, Sign, named_in, rules
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
_RUNNING = {"data", "step", "compile", "memory", "collective", "checkpoint"}
"""Stages of a run that has started to train."""
_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"})
"""Signals that a process receives because of its own actions."""
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
    ended. Warnings, and causes of slowness, are never the reason for a failure.

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
    used = rules() if table is None else table
    matches = seen.matches(used)
    if matches and all(match.rule.kind == "symptom" for match in matches) and seen.reasons.widen():
        matches = seen.matches(used)
    return Causes(_rank(matches, seen))


@dataclass(frozen=True)
class _Match:
    rule: FailureRule
    confidence: float
    lines: tuple[int, ...]
    first: int
    """The first of the lines; one beyond the end of the log if there is no line."""
    crash: bool
    """True if a process crashed: a fatal line, or a signal that it caused itself."""
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
        codes = facts.exits.values() or [returncode or 0]
        self.all_by_signal = any(codes) and not any(exit_name(c).isdigit() for c in codes if c)
        """True if a signal ended each process that failed: no exception did."""
        self.ended_by_itself = facts.state not in (RunState.HUNG, RunState.TIMED_OUT) and bool(
            self.exits or self.reasons.exceptions or self.reasons.fatal
        )

    def matches(self, table: Sequence[FailureRule]) -> list[_Match]:
        backend = self.facts.backend
        known = [rule for rule in table if backend is None or backend in rule.backends]
        found = [match for rule in known if (match := self.match(rule)) is not None]
        explained = {number for match in found for number in match.lines}
        if self.reasons.unexplained(explained) and not self.all_by_signal:
            # That exception is shown anyway, and explains more than the ends of other processes.
            found = [match for match in found if match.rule.kind != "symptom" or match.crash]
        return found

    def match(self, rule: FailureRule) -> _Match | None:
        """Return the rule with all its evidence; None if there is none."""
        if rule.kind == "slow" and self.ended_by_itself:
            return None
        best = 0.0
        lines: set[int] = set()
        ends: dict[str, None] = {}
        beside: list[Evidence] = []
        for sign in rule.signs:
            matching = self.lines_of(sign, slow=rule.kind == "slow")
            if (sign.lines and not matching) or not self.holds(sign):
                continue
            best = max(best, sign.confidence)
            lines.update(matching)
            ends.update(dict.fromkeys(name for name in self.exits if name in sign.exit))
            if sign.report:
                report = self.log.report
                beside.append(
                    Evidence(f"{report.compiles} compilations for {report.executions} executions")
                )
        if not best:
            return None
        beside += [
            Evidence(f"ended with {n}" if n.isdigit() else f"ended by {n}", self.exits[n])
            for n in ends
        ]
        ordered = tuple(sorted(lines))
        evidence = [*_evidence(ordered, self.log), *dict.fromkeys(beside)]
        first = ordered[0] if ordered else len(self.log.lines)
        crash = not _CRASHES.isdisjoint(ends) or not self.reasons.fatal.isdisjoint(lines)
        return _Match(rule, best, ordered, first, crash, tuple(evidence[:_LINES]))

    def lines_of(self, sign: Sign, *, slow: bool) -> list[int]:
        """Return the lines that may be a reason and match one of the sign's patterns."""
        among = self.reasons.candidates.find
        found = sorted({number for line in sign.lines for number in self.all_of(line, among)})
        if sign.last:
            found = [number for number in found if number == self.log.last]
        kept: list[int] = []
        for number in found:
            if len(kept) == _HITS:
                break
            if not self.reasons.counts(number, notices_too=slow or sign.notices):
                continue
            body = self.log.body(number)
            if any(one.search(body) for one in sign.unless):
                continue
            if not sign.in_library or self.is_raised_in_library(number, sign):
                kept.append(number)
        return kept

    def is_raised_in_library(self, number: int, sign: Sign) -> bool:
        """True if a library's own line raised it, in which what the message names is written."""
        error = self.reasons.exception_of([number])
        origin = Origin.of(self.log, error) if error is not None else None
        if origin is None or origin.raised.library is None:
            return False
        body = self.log.body(number)
        name = named_in(body, [sign]).get("written")
        return name is None or bool(re.search(rf"\b{name}\b", origin.raised.code))

    def all_of(self, line: Line, find: Callable[[LinePattern], list[int]]) -> list[int]:
        """Return the numbers of the lines that match all of these patterns."""
        first, *others = line
        return [n for n in find(first) if all(one.regex.search(self.log.body(n)) for one in others)]

    def holds(self, sign: Sign) -> bool:
        """True if every condition of the sign holds, apart from that on its lines."""
        if sign.exit and not sign.exit & set(self.exits):
            return False
        if any(getattr(self.facts, name) != value for name, value in sign.facts.items()):
            return False
        if not all(self.all_of(line, self.log.find) for line in sign.context):
            return False
        report = self.log.report if sign.report else None
        return report is None or all(
            report.share < bound if name == "share_below" else getattr(report, name) >= bound
            for name, bound in sign.report.items()
        )


def _evidence(numbers: Sequence[int], log: Log) -> list[Evidence]:
    """The lines as evidence; equal lines of several ranks are combined."""
    ranks: dict[str, list[int]] = {}
    cells: dict[str, int | None] = {}
    for number in numbers:
        line = log.body(number).strip()
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
    names = {match.rule.id for match in matches}
    causes = {match.rule.id for match in matches if match.rule.kind == "cause"}
    explained = {
        other
        for match in matches
        for other in match.rule.explains & names
        if not (other in causes and match.rule.kind == "symptom")
    }
    # Of two that explain each other, neither ranks behind.
    explained -= {
        a.rule.id
        for a in matches
        for b in matches
        if a.rule.id in b.rule.explains and b.rule.id in a.rule.explains
    }

    kinds = {match.rule.kind for match in matches}
    reached = max((match.first for match in matches if match.rule.stage in _RUNNING), default=-1)

    def weight(match: _Match) -> float:
        behind = {
            "cause": False,
            "symptom": "cause" in kinds,
            "slow": bool(kinds & {"cause", "symptom"}),
        }[match.rule.kind]
        if match.rule.stage == "install" and match.first < reached:
            behind = True  # it was fixed: the run got further
        if match.rule.stage in ("install", "start") and facts.stage == "step":
            behind = True  # the run itself has recorded that it got further
        return match.confidence * (_STEP_BACK if behind or match.rule.id in explained else 1)

    def order(match: _Match) -> tuple[float, int, float]:
        sure = min(weight(match), _SURE)
        return (-sure, match.first, -match.confidence)

    ordered = sorted(matches, key=order)[:_MOST]
    answers: list[Diagnosis] = []
    ceiling = 1.0
    for match in ordered:
        ceiling = min(ceiling, weight(match))
        error = seen.reasons.exception_of(match.lines)
        cause, steps = texts(match.rule, error, seen.log, facts)
        answers.append(
            Diagnosis(
                match.rule.id,
                cause,
                " ".join(steps),
                match.evidence,
                round(ceiling, 2),
                match.rule.link,
                steps,
            )
        )
    if answers and (observed := facts.observations(ordered[0].rule.stage)):
        evidence = (*map(Evidence, observed), *answers[0].evidence)
        answers[0] = replace(answers[0], evidence=evidence)
    return answers


# The most informative lines, for logs that no rule matches

_EXCEPTION = re.compile(
    r"^\s*(?:[A-Za-z_][\w.]*\.)?(?:[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)"
    r"|Exception|StopIteration|Empty|Killed)(?::|$|\s*$)"
    r"|^(?:[a-z_]\w*\.)+[A-Z]\w+(?<!Warning): "
)
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
        line = log.body(number)[:_LONGEST].rstrip()
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
    if _EXCEPTION.search(line) or _FATAL.search(line):
        return 3
    if _KILLED.search(line):
        return 2
    lowered = line.lower()
    return 1 if "error" in lowered or "failed" in lowered else 0
