from __future__ import annotations

import pytest
import yaml

from tpunb.diagnosis.table import RuleError, read_rules, rules

GOOD = {
    "id": "moon",
    "kind": "cause",
    "stage": "start",
    "cause": "The moon is full.",
    "fix": "Wait.",
    "source": "https://example.org/moon",
    "versions": "all",
    "patterns": ["the moon is full"],
}


def read(**changes: object) -> None:
    entry = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    read_rules({"sky.yaml": yaml.safe_dump([entry])})


def test_a_good_rule_is_read() -> None:
    read()
    (rule,) = read_rules({"sky.yaml": yaml.safe_dump([GOOD])})
    assert (rule.id, rule.signs[0].confidence) == ("moon", 0.9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fix": None}, "lacks fix"),
        ({"fix": " "}, "fix must be text"),
        ({"colour": "red"}, "unknown keys: colour"),
        ({"kind": "guess"}, "cause, symptom or slow"),
        ({"source": "a friend"}, "https address"),
        ({"patterns": []}, "at least one"),
        ({"patterns": ["a.b"]}, "fixed characters"),
        ({"patterns": ["(moon"]}, "not a regular expression"),
        ({"patterns": [{"txt": "the moon"}]}, "unknown keys: txt"),
        ({"patterns": [{"with": "the moon"}]}, "needs text, exit, facts or report"),
        ({"patterns": [{"facts": {"mood": "bad"}}]}, "unknown facts: mood"),
        ({"patterns": [{"report": {"tides": 3}}]}, "tides"),
        ({"confidence": 3}, "confidence must be"),
        ({"explains": ["sun"]}, "unknown rules: sun"),
    ],
)
def test_a_bad_rule_names_file_rule_and_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RuleError, match=reason) as caught:
        read(**changes)
    assert str(caught.value).startswith("sky.yaml: rule moon: ")


@pytest.mark.parametrize("text", ["{", "moon: 1", "- moon"])
def test_a_file_that_is_no_list_of_rules_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match=r"sky\.yaml"):
        read_rules({"sky.yaml": text})


def test_an_id_is_there_once() -> None:
    text = yaml.safe_dump([GOOD])
    with pytest.raises(RuleError, match=r"there is one of this id in a\.yaml"):
        read_rules({"a.yaml": text, "b.yaml": text})


def test_the_rules_of_the_package_are_read_once() -> None:
    assert rules() is rules()
    assert len(rules()) > 60


def test_a_symptom_never_explains_a_cause_away() -> None:
    table = {rule.id: rule for rule in rules()}
    for rule in rules():
        if rule.kind == "symptom":
            assert all(table[other].kind == "symptom" for other in rule.explains), rule.id
