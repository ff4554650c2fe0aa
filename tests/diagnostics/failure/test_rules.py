from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml

from tests.foreign import foreign
from tpunb.diagnostics.failure import Facts, diagnose
from tpunb.diagnostics.failure import rules as rules_module
from tpunb.diagnostics.failure.rules import read_rules, rules
from tpunb.runs.spec import BackendName

GOOD = {
    "id": "moon",
    "cause": "The moon is full.",
    "fix": "Wait.",
    "source": "https://example.org/moon",
    "signs": ["the moon is full"],
}


FACTS = {field.name for field in fields(Facts)} | {"memory_full", "host_lost"}
FOLDER = Path(rules_module.__file__).parent / "rules"
SCHEMA = json.loads(Path(__file__).with_name("rules.schema.json").read_text(encoding="utf-8"))


def test_schema_of_the_rules() -> None:
    """Each file satisfies it; each pattern is one, and matches no line that says nothing."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for path in FOLDER.glob("*.yaml"):
        validator.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    with pytest.raises(jsonschema.ValidationError):
        validator.validate([{**GOOD, "colour": "red"}])
    table = rules()
    assert len({rule.id for rule in table}) == len(table)
    for rule in table:
        assert rule.explains <= {other.id for other in table}, rule.id
        for sign in rule.signs:
            assert set(sign.facts) <= FACTS, rule.id
            patterns = [one for line in (*sign.lines, *sign.context) for one in line]
            for regex in (*sign.unless, *patterns):
                assert not any(map(regex.search, ("", "-"))), regex.pattern


def test_the_table_stays_small() -> None:
    """Only failures that people meet often, and whose cause and fix are certain."""
    assert 50 < len(rules()) <= 70
    assert rules() is rules()
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.iterdir())
    assert lines <= 1800


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


@pytest.mark.parametrize("backend", get_args(BackendName))
def test_no_rule_speaks_of_what_the_runs_backend_does_not_have(backend: BackendName) -> None:
    """Except what all its signs name, that is, the user's own error; in the cause, one of them."""
    wrong = []
    for rule in rules():
        if backend in rule.backends:
            lines = [line for sign in rule.signs for line in sign.lines]
            said = [" ".join(one.pattern for one in line) for line in lines]
            wrong += [(rule.id, word) for word in foreign(rule.cause, backend, [" ".join(said)])]
            for platform in (None, "colab", "kaggle", "gcp"):
                texts = " ".join((*rule.steps(platform, backend), rule.link))
                wrong += [(rule.id, word) for word in foreign(texts, backend, said or [""])]
    assert not wrong


def test_a_rule_of_another_backend_is_no_answer() -> None:
    (rule,) = read_rules({"sky.yaml": yaml.safe_dump([{**GOOD, "backends": ["xla"]}])})
    for backend in get_args(BackendName):
        found = diagnose("the moon is full", table=[rule], facts=Facts(backend=backend))
        assert bool(found) is (backend == "xla")
    assert diagnose("the moon is full", table=[rule])


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
        ({"any": "moon sets"}, "UserWarning: the moon sets", False),
    ],
)
def test_the_conditions_of_a_sign(sign: object, log: str, holds: bool) -> None:
    table = read_rules({"sky.yaml": yaml.safe_dump([{**GOOD, "signs": [sign]}])})
    assert bool(diagnose(log, table=table)) is holds
