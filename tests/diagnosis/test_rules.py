from __future__ import annotations

from pathlib import Path

import pytest

from tpunb.diagnosis import diagnose
from tpunb.diagnosis.table import rules

EXAMPLES = Path(__file__).parent / "examples"
RULES = {rule.id: rule for rule in rules()}
IDS = list(RULES)
NEAR = sorted(path.stem for path in (EXAMPLES / "near").glob("*.log"))


def read(path: Path) -> tuple[int | None, str]:
    """How the run of an example ended and its log. The first line may be `# ended: 137`."""
    text = path.read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    if first.startswith("# ended: "):
        return int(first.removeprefix("# ended: ")), rest
    return None, text


def answer(path: Path) -> list[str]:
    ended, text = read(path)
    return [found.id for found in diagnose(text, ended)]


def test_every_rule_has_an_example_and_every_example_a_rule() -> None:
    assert sorted(IDS) == sorted(path.stem for path in EXAMPLES.glob("*.log"))
    assert set(NEAR) <= set(IDS)
    assert len(NEAR) > 35


@pytest.mark.parametrize("rule", IDS)
def test_only_its_rule_explains_an_example(rule: str) -> None:
    # What the rule calls its consequences may be seen too, behind it: no crash without a signal.
    found = answer(EXAMPLES / f"{rule}.log")
    assert found[0] == rule
    assert set(found[1:]) <= RULES[rule].explains
    rest = [other for name, other in RULES.items() if name != rule]
    ended, text = read(EXAMPLES / f"{rule}.log")
    without = diagnose(text, ended, table=rest)
    assert {one.id for one in without} <= {i for i in IDS if RULES[i].kind == "symptom"}


@pytest.mark.parametrize("rule", NEAR)
def test_a_near_miss_is_not_taken_for_it(rule: str) -> None:
    assert rule not in answer(EXAMPLES / "near" / f"{rule}.log")


@pytest.mark.parametrize("rule", IDS)
def test_an_example_is_explained_in_a_log_of_ranks_and_in_a_notebook(rule: str) -> None:
    ended, text = read(EXAMPLES / f"{rule}.log")
    bar = "|██   | 4/9 [00:04<00:05]"
    noise = [f"\x1b[32mstep {n}\x1b[0m loss 0.{n} {n}0%{bar}" for n in range(9)]
    lines = [f"[2] {line}" for line in text.rstrip("\n").split("\n")]
    prefixed = "\n".join([*(f"[1] {line}" for line in noise), *lines]) + "\n"
    carriage = "\r".join(noise) + "\r\n" + text.replace("\n", "\r\n")
    red = "\n".join(f"\x1b[0;31m{line}\x1b[0m" for line in text.rstrip("\n").split("\n"))
    for shape in (prefixed, carriage, red):
        found = diagnose(shape, ended)
        assert [one.id for one in found][:1] == [rule], shape


@pytest.mark.parametrize("rule", IDS)
def test_a_run_that_succeeded_has_no_cause(rule: str) -> None:
    assert diagnose(read(EXAMPLES / f"{rule}.log")[1], 0) == []


@pytest.mark.parametrize("rule", IDS)
def test_texts_of_a_rule_fit_on_a_screen_and_are_shown_whole(rule: str) -> None:
    ended, text = read(EXAMPLES / f"{rule}.log")
    best = diagnose(text, ended)[0]
    shown = str(best)
    assert len(shown.split("\n")) <= 20
    words = " ".join(shown.split())
    assert best.cause in words
    assert best.fix in words
    assert words.endswith(best.link)
    assert all(len(line) <= 100 for line in shown.split("\n"))
