"""The rule and log on the page about adding rules work as it says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.diagnostics.failure.test_rules import SCHEMA
from tpunb.diagnostics.failure import diagnose
from tpunb.diagnostics.failure.facts import Facts
from tpunb.diagnostics.failure.rules import read_rules, rules

PAGE = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)
    return str(text)


def test_the_rule_of_the_page_works_as_the_page_says() -> None:
    text = block("yaml")
    assert len(text.splitlines()) <= 20
    package = Path(__file__).parents[3] / "tpunb/diagnostics/failure/rules"
    files = {path.name: path.read_text(encoding="utf-8") for path in package.glob("*.yaml")}
    table = read_rules({**files, "new.yaml": text})
    log = block("text")
    assert [found.id for found in diagnose(log)] == ["loader-worker-died"]
    first, second = diagnose(log, table=table)
    assert (first.id, second.id) == ("dataset-moved", "loader-worker-died")
    assert (first.evidence[0].ranks, first.evidence[0].cell) == ((2,), 5)
    assert second.confidence < first.confidence / 2
    assert [one.id for one in diagnose(log, table=table, facts=Facts(platform="kaggle"))]
    assert len(table) == len(rules()) + 1


def test_the_page_names_every_key() -> None:
    rule, sign = SCHEMA["items"]["properties"], SCHEMA["$defs"]["sign"]["oneOf"][1]["properties"]
    for key in {**rule, **sign}.keys() - {"id", "cause"}:
        assert f"`{key}`" in PAGE, key
