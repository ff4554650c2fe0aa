"""`Snapshot` → what would fail, hang or be slow on a TPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from tpunb.lint import silence, topics
from tpunb.lint.book import Book
from tpunb.lint.certainty import Certainty
from tpunb.lint.findings import SEVERITIES, Finding
from tpunb.lint.pages import Page, pages
from tpunb.lint.rules import RULES, Hit, Rule
from tpunb.lint.silence import Silence
from tpunb.lint.walk import Site
from tpunb.models import Snapshot

__all__ = ["UNKNOWN", "lint", "topics"]

UNKNOWN = "unknown-rule"
"""The rule of a comment that names a rule which does not exist."""


def lint(snapshot: Snapshot) -> list[Finding]:
    """The findings in a notebook, in its order; in a line the worst first.

    Reads only: nothing is run or imported. With a train cell the rules look at it as
    `%%tpu_train` runs it; without one, at the notebook as its kernel runs it. What
    `# tpunb: ignore[...]` silences is left out.
    """
    with _without_collector():
        return _lint(pages(snapshot))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Trees are many objects that all stay: to look for garbage among them takes half the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _lint(read: list[Page]) -> list[Finding]:
    book = Book(read)
    certainty = Certainty(book)
    silences = {page.index: silence.read(page) for page in read}
    found: dict[tuple[int, int, int, str, str], Finding] = {}
    for rule in RULES.values():
        for hit in rule.check(book):
            if hit.page.part == "kernel" and not rule.kernel:
                continue
            finding = _finding(rule, hit, certainty)
            if not silences[hit.page.index].covers(rule.id, finding.line):
                worst = SEVERITIES.index(finding.severity)
                key = (hit.page.index, finding.line, worst, rule.id, finding.message)
                found.setdefault(key, finding)
    for page in read:
        for line, name in _unknown(silences[page.index]):
            found[page.index, line, len(SEVERITIES), UNKNOWN, name] = Finding(
                UNKNOWN,
                "hint",
                page.number,
                line,
                f"there is no rule {name!r} to ignore",
                "take it out, or name one of the rules in docs/lint.md",
                source=page.lines[line - 1],
            )
    book.close()
    return [found[key] for key in sorted(found)]


def _finding(rule: Rule, hit: Hit, certainty: Certainty) -> Finding:
    page = hit.page
    line = min(max(hit.line, 1), len(page.lines))
    severity = hit.severity or rule.severity
    certain = (
        severity == "error"
        and hit.certain
        and isinstance(hit.at, Site)
        and certainty.reaches(hit.at)
        and certainty.names_are_sure(hit.at)
    )
    fix = hit.fix or rule.fix
    return Finding(
        rule.id,
        severity,
        page.number,
        line,
        hit.message,
        fix,
        certain,
        page.lines[line - 1],
    )


def _unknown(silence: Silence) -> Iterator[tuple[int, str]]:
    for line, name in silence.named:
        if name not in RULES:
            yield line, name
