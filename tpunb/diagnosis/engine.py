"""Applies the table of rules to a log and to what is known beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpunb.diagnosis.finding import Causes, Diagnosis, Evidence, Facts, exit_name
from tpunb.diagnosis.log import Log
from tpunb.diagnosis.table import Rule, Sign, rules

_MOST = 5
"""Causes in an answer."""
_LINES = 4
"""Different lines of evidence for a cause."""
_HITS = 64
"""Matching lines that are looked at for them."""
_STEP_BACK = 0.4
"""What is left of the confidence in a cause that another one explains."""
_RUNNING = {"data", "step", "compile", "memory", "collective", "checkpoint"}
"""Stages of a run that has begun to train."""
_SURE = 0.7
"""Causes that are this sure compete by time: the first in the log wins."""


def diagnose(
    text: str,
    returncode: int | None = None,
    *,
    facts: Facts | None = None,
    table: Sequence[Rule] | None = None,
) -> list[Diagnosis]:
    """The known causes that a log speaks for, the most likely first.

    Args:
        text: The log of one run, of all its ranks: colours, progress bars, the prefixes of
            ranks, and the JSON in which Kaggle gives logs are understood.
        returncode: How the process ended; negative or above 128 for a signal. With 0 nothing
            is wrong, whatever the log says. None: not known.
        facts: What else is known; nothing by default.
        table: The rules; those of this package by default.

    Returns:
        At most five, best first; empty if no cause is known (see `telling_lines`).
    """
    facts = facts or Facts()
    if returncode == 0 or facts.state == "succeeded":
        return []
    ending = _Ending.of(returncode, facts)
    log = Log(text)
    found = [
        match
        for rule in (rules() if table is None else table)
        if (match := _match(rule, log, ending)) is not None
    ]
    return Causes(_ranked(found, facts))


@dataclass(frozen=True)
class _Ending:
    """How the run ended, in the words of rules."""

    failed: bool
    exits: dict[str, tuple[int, ...]]
    """The ranks that ended so, by 'SIGKILL' or '17'; none for the run itself."""
    facts: Facts

    @classmethod
    def of(cls, returncode: int | None, facts: Facts) -> _Ending:
        exits: dict[str, tuple[int, ...]] = {}
        if returncode:
            exits[exit_name(returncode)] = ()
        for rank, code in sorted(facts.exits.items()):
            if code:
                name = exit_name(code)
                exits[name] = (*exits.get(name, ()), rank)
        return cls(bool(exits) or facts.state in ("failed", "hung", "timed_out"), exits, facts)


@dataclass(frozen=True)
class _Match:
    rule: Rule
    confidence: float
    line: int
    """The first line that speaks for it; beyond the log for what is not in the log."""
    evidence: tuple[Evidence, ...]


def _match(rule: Rule, log: Log, ending: _Ending) -> _Match | None:
    """The rule with everything that speaks for it; None if nothing does."""
    best = 0.0
    numbers: set[int] = set()
    beside: list[Evidence] = []
    for sign in rule.signs:
        if not _holds(sign, log, ending):
            continue
        best = max(best, sign.confidence)
        if sign.text is not None:
            numbers.update(log.find(sign.text, _HITS))
        beside += [
            Evidence(f"ended with {name}" if name.isdigit() else f"ended by {name}", ranks)
            for name, ranks in ending.exits.items()
            if name in sign.exit
        ]
        if sign.report:
            report = log.report
            beside.append(
                Evidence(f"{report.compiles} compilations for {report.executions} executions")
            )
    if not best:
        return None
    lines = sorted(numbers)
    evidence = [*_evidence(lines, log), *dict.fromkeys(beside)]
    first = lines[0] if lines else len(log.lines)
    return _Match(rule, best, first, tuple(evidence[:_LINES]))


def _holds(sign: Sign, log: Log, ending: _Ending) -> bool:
    """True if everything holds that the sign asks for; the cheapest is looked at first."""
    if sign.failed and not ending.failed:
        return False
    if sign.exit and not sign.exit & set(ending.exits):
        return False
    if any(getattr(ending.facts, name) != value for name, value in sign.facts.items()):
        return False
    if sign.text is not None and not log.has(sign.text):
        return False
    if sign.last and sign.text is not None and not log.ends_with(sign.text):
        return False
    if not all(log.has(pattern) for pattern in sign.also):
        return False
    if any(log.has(pattern) for pattern in sign.without):
        return False
    report = log.report if sign.report else None
    return report is None or all(
        report.share < bound if name == "share_below" else getattr(report, name) >= bound
        for name, bound in sign.report.items()
    )


def _evidence(numbers: Sequence[int], log: Log) -> list[Evidence]:
    """The lines, equal ones of several ranks as one."""
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
    return [Evidence(_shortened(line), tuple(sorted(ranks[line])), cells[line]) for line in ranks]


def _shortened(line: str, most: int = 400) -> str:
    return line if len(line) <= most else line[: most - 2] + " …"


def _ranked(found: Sequence[_Match], facts: Facts) -> list[Diagnosis]:
    """First causes that nothing explains, the sure ones in order of time; then the others."""
    names = {match.rule.id for match in found}
    causes = {match.rule.id for match in found if match.rule.kind == "cause"}
    explained = {
        other
        for match in found
        for other in match.rule.explains & names
        if not (other in causes and match.rule.kind == "symptom")
    }
    # Two that explain each other: neither steps back.
    explained -= {
        a.rule.id
        for a in found
        for b in found
        if a.rule.id in b.rule.explains and b.rule.id in a.rule.explains
    }

    kinds = {match.rule.kind for match in found}
    reached = max((match.line for match in found if match.rule.stage in _RUNNING), default=-1)

    def weight(match: _Match) -> float:
        behind = {
            "cause": False,
            "symptom": "cause" in kinds,
            "slow": bool(kinds & {"cause", "symptom"}),
        }[match.rule.kind]
        if match.rule.stage == "install" and match.line < reached:
            behind = True  # it was mended: the run has come further
        if match.rule.stage in ("install", "start") and facts.stage == "step":
            behind = True  # the run itself has seen that it came further
        return match.confidence * (_STEP_BACK if behind or match.rule.id in explained else 1)

    def order(match: _Match) -> tuple[float, int, float]:
        sure = min(weight(match), _SURE)
        return (-sure, match.line, -match.confidence)

    ordered = sorted(found, key=order)[:_MOST]
    answers: list[Diagnosis] = []
    ceiling = 1.0
    for match in ordered:
        ceiling = min(ceiling, weight(match))
        answers.append(
            Diagnosis(
                match.rule.id,
                match.rule.cause,
                match.rule.fix,
                match.evidence,
                round(ceiling, 2),
                match.rule.source,
            )
        )
    if answers and (seen := facts.observations(ordered[0].rule.stage)):
        evidence = (*map(Evidence, seen), *answers[0].evidence)
        answers[0] = replace(answers[0], evidence=evidence)
    return answers
