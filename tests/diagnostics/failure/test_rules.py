from __future__ import annotations

import pytest
import yaml

from tpunb.diagnostics.failure import Facts, diagnose
from tpunb.diagnostics.failure.rules import RuleError, read_rules, rules

GOOD = {
    "id": "moon",
    "kind": "cause",
    "stage": "start",
    "cause": "The moon is full.",
    "fix": "Wait.",
    "source": "https://example.org/moon",
    "versions": "all",
    "signs": ["the moon is full"],
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
        ({"fix": []}, "fix must be text"),
        ({"fix": {"kaggle": "Wait."}}, "fix lacks any"),
        ({"fix": {"any": "Wait.", "moon": "Jump."}}, "unknown places: moon"),
        ({"colour": "red"}, "unknown keys: colour"),
        ({"kind": "guess"}, "cause, symptom or slow"),
        ({"stage": "dtaa"}, "stage must be one of install, "),
        ({"source": "a friend"}, "https address"),
        ({"signs": []}, "at least one"),
        ({"signs": [".*"]}, "matches nearly every line"),
        ({"signs": ["(moon"]}, "not a regular expression"),
        ({"signs": [["moon", "(full"]]}, "not a regular expression"),
        ({"signs": [[]]}, "is empty"),
        ({"signs": ["|".join(["the moon is full"] * 9)]}, "longer than 110 characters"),
        ({"signs": [7]}, "a pattern or a mapping, not 7"),
        ({"signs": [{"txt": "the moon"}]}, "unknown keys: txt"),
        ({"signs": [{"with": "the moon"}]}, "needs any, exit, facts or report"),
        ({"signs": [{"exit": ["SIGKILL"], "last": True}]}, "need any"),
        ({"signs": [{"exit": 137}]}, "exit must be a list"),
        ({"signs": [{"facts": {"mood": "bad"}}]}, "unknown facts: mood"),
        ({"signs": [{"facts": "mood"}]}, "facts must be a mapping"),
        ({"signs": [{"report": {"tides": 3}}]}, "tides"),
        ({"harmless": {"moon": "new"}}, "harmless must be text"),
        ({"explains": {"sun": 1}}, "explains must be text"),
        ({"confidence": 3}, "confidence must be"),
        ({"explains": ["sun"]}, "unknown rules: sun"),
    ],
)
def test_a_bad_rule_names_file_rule_and_reason(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RuleError, match=reason) as caught:
        read(**changes)
    assert str(caught.value).startswith("sky.yaml: rule moon: ")


@pytest.mark.parametrize("text", ["{", "moon: 1", "- moon"])
def test_a_file_that_is_not_a_list_of_rules_is_refused(text: str) -> None:
    with pytest.raises(RuleError, match=r"sky\.yaml"):
        read_rules({"sky.yaml": text})


def test_an_id_is_unique() -> None:
    text = yaml.safe_dump([GOOD])
    with pytest.raises(RuleError, match=r"a\.yaml has a rule of this id"):
        read_rules({"a.yaml": text, "b.yaml": text})


def test_the_rules_of_the_package_are_read_once() -> None:
    assert rules() is rules()
    assert len(rules()) > 60


def test_rules_explain_only_rules_of_their_kind() -> None:
    # Symptoms rank behind every cause anyway, and never explain one away.
    table = {rule.id: rule for rule in rules()}
    for rule in rules():
        assert {table[other].kind for other in rule.explains} <= {rule.kind}, rule.id


def test_a_fix_is_chosen_by_platform() -> None:
    fix = {"any": ["Look up.", "Wait."], "kaggle": "Close the\n  curtains."}
    (rule,) = read_rules({"sky.yaml": yaml.safe_dump([{**GOOD, "fix": fix}])})
    assert rule.steps("kaggle") == ("Close the curtains.",)
    assert rule.steps("colab") == rule.steps(None) == ("Look up.", "Wait.")
    (found,) = diagnose("the moon is full", table=[rule], facts=Facts(platform="kaggle"))
    assert (found.fix, found.steps) == ("Close the curtains.", ("Close the curtains.",))
    assert diagnose("the moon is full", table=[rule])[0].fix == "Look up. Wait."


@pytest.mark.parametrize(
    ("sign", "log", "holds"),
    [
        (["moon rises", "full"], "full: the moon rises", True),
        (["moon rises", "full"], "the moon rises\nfull", False),
        ({"any": ["moon rises", "moon sets"], "not": "not"}, "the moon sets", True),
        ({"any": ["moon rises", "moon sets"], "not": "not"}, "not that the moon sets", False),
        ({"any": "moon sets", "not": "clouds"}, "the moon sets\nclouds", True),
        ({"any": "moon sets", "with": "clouds"}, "clouds\nthe moon sets", True),
        ({"any": "moon sets", "with": "clouds"}, "the moon sets", False),
        ({"any": "moon sets", "last": True}, "the moon sets\n\n", True),
        ({"any": "moon sets", "last": True}, "the moon sets\nclouds", False),
        ({"any": "moon sets", "notices": True}, "UserWarning: the moon sets", True),
        ({"any": "moon sets"}, "UserWarning: the moon sets", False),
    ],
)
def test_the_conditions_of_a_sign(sign: object, log: str, holds: bool) -> None:
    table = read_rules({"sky.yaml": yaml.safe_dump([{**GOOD, "signs": [sign]}])})
    assert bool(diagnose(log, table=table)) is holds
