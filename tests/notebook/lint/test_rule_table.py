import re
from pathlib import Path

import pytest

from tests.foreign import foreign
from tests.notebook.lint.examples import EXAMPLES
from tests.notebook.lint.notebooks import notebook
from tpunb.notebook.lint.findings import Finding
from tpunb.notebook.lint.linter import UNKNOWN, lint
from tpunb.notebook.lint.rule_table import ANY, RULES, table
from tpunb.runs.spec import BackendName

DOCS = Path(__file__).parents[3] / "docs" / "lint.md"
FIRES = [(rule, cells) for rule, (fires, _) in EXAMPLES.items() for cells in fires]
QUIET = [(rule, cells) for rule, (_, quiet) in EXAMPLES.items() for cells in quiet]


def backend(rule: str) -> BackendName:
    return "xla" if "xla" in RULES[rule].backends else "torchtpu"


def test_every_rule_has_examples_and_near_misses() -> None:
    assert EXAMPLES.keys() == RULES.keys()
    assert all(fires and quiet for fires, quiet in EXAMPLES.values())


@pytest.mark.parametrize(("rule", "cells"), FIRES, ids=[rule for rule, _ in FIRES])
def test_a_rule_finds_its_example_in_the_right_line(rule: str, cells: tuple[str, ...]) -> None:
    marked = {
        (number, line)
        for number, cell in enumerate(cells, 1)
        for line, text in enumerate(cell.strip("\n").split("\n"), 1)
        if text.endswith("# <-")
    }
    # A comment would be part of a shell line, so shell lines are not marked: the last line counts.
    marked = marked or {(len(cells), len(cells[-1].strip("\n").split("\n")))}
    findings = [f for f in lint(notebook(*cells), backend=backend(rule)) if f.rule == rule]
    assert {(finding.cell, finding.line) for finding in findings} == marked
    for finding in findings:
        assert finding.message
        assert finding.fix
        assert (
            finding.source
            == cells[(finding.cell or 0) - 1].strip("\n").split("\n")[finding.line - 1]
        )


@pytest.mark.parametrize(("rule", "cells"), QUIET, ids=[rule for rule, _ in QUIET])
def test_a_rule_is_quiet_at_its_near_miss(rule: str, cells: tuple[str, ...]) -> None:
    found = lint(notebook(*cells), backend=backend(rule))
    assert rule not in {finding.rule for finding in found}


@pytest.mark.parametrize("backend", sorted(ANY))
def test_rules_of_other_backends_do_not_fire(backend: BackendName) -> None:
    for rule, cells in FIRES:
        findings = [f for f in lint(notebook(*cells), backend=backend) if f.rule != UNKNOWN]
        assert all(backend in RULES[finding.rule].backends for finding in findings), rule
        for finding in findings:
            said = "\n".join((*cells, "a GPU"))  # what fails may be said
            assert not foreign(finding.message, backend, [said]), finding
            assert not foreign(finding.fix, backend, [finding.source]), finding


OF_SEVERAL = re.compile(r"\b(every|each|all|several|other) (core|rank)s?\b|averag")


@pytest.mark.parametrize("own", [True, False], ids=["own", "all"])
def test_rules_about_several_ranks_are_silent_about_one(own: bool) -> None:
    """A rule that does not say so finds the same with one rank, and speaks of no others."""
    for rule, cells in FIRES:
        program, name = notebook(*cells), backend(rule)
        alone = lint(program, backend=name, ranks=1, own=own)
        assert not [f for f in alone if f.rule != UNKNOWN and RULES[f.rule].several], rule
        for finding in alone:
            assert not OF_SEVERAL.search(f"{finding.message} {finding.fix}"), finding
        if not own and not RULES[rule].several:
            assert rule in {finding.rule for finding in alone}
        if not own:
            both = [f for f in lint(program, backend=name, ranks=2) if not _several(f)]
            assert both == alone


def _several(finding: Finding) -> bool:
    return finding.rule != UNKNOWN and RULES[finding.rule].several


def test_rules_say_what_why_and_what_to_do() -> None:
    for rule in RULES.values():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.id)
        assert rule.what
        assert rule.why.endswith(")")
        assert rule.fix


def test_the_documentation_has_the_table_of_rules() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert table() in text
    assert UNKNOWN in text
