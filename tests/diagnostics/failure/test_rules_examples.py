from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tpunb.diagnostics.failure import diagnose
from tpunb.diagnostics.failure.rules import rules
from tpunb.machine import packages
from tpunb.utils.install_commands import UV_INSTALL

EXAMPLES = Path(__file__).parent / "examples"
REPORTS = Path(__file__).with_name("reports.yaml")
RULES = {rule.id: rule for rule in rules()}
IDS = list(RULES)
_ORDER = {"cause": 0, "symptom": 1}
NEAR = sorted(path.stem for path in (EXAMPLES / "near").glob("*.log"))


def read(path: Path) -> tuple[int | None, str]:
    """The return code and log of an example. The first line may be `# ended: 137`."""
    text = path.read_text(encoding="utf-8")
    first, _, rest = text.partition("\n")
    if first.startswith("# ended: "):
        return int(first.removeprefix("# ended: ")), rest
    return None, text


def answer(path: Path) -> list[str]:
    ended, text = read(path)
    return [found.id for found in diagnose(text, ended)]


# Each test loops over all rules: there are many, and a separate test for each costs more time.


def test_every_rule_has_an_example_and_every_example_a_rule() -> None:
    assert sorted(IDS) == sorted(path.stem for path in EXAMPLES.glob("*.log"))
    assert set(NEAR) <= set(IDS)
    assert len(NEAR) > 25


def test_only_its_rule_explains_an_example() -> None:
    for rule in IDS:
        # Its consequences may be seen too, behind it: no crash without a signal.
        best, *others = answer(EXAMPLES / f"{rule}.log")
        assert best == rule, best
        assert all(
            other in RULES[rule].explains or _ORDER[RULES[other].kind] > _ORDER[RULES[rule].kind]
            for other in others
        ), (rule, others)
        rest = [other for name, other in RULES.items() if name != rule]
        ended, text = read(EXAMPLES / f"{rule}.log")
        without = diagnose(text, ended, table=rest)
        symptoms = {i for i in IDS if RULES[i].kind == "symptom"}
        assert {one.id for one in without} <= symptoms | RULES[rule].explains, rule


def test_a_rule_ranks_before_those_that_it_explains() -> None:
    """And only because of `explains`: an entry that changes nothing is noise."""
    for rule in RULES.values():
        for other in rule.explains:
            logs = [read(EXAMPLES / f"{name}.log")[1] for name in (other, rule.id)]
            prefixed = [
                re.sub(r"^(?:\[\d\] )?", f"[{rank}] ", log.strip(), flags=re.MULTILINE)
                for rank, log in enumerate(logs)
            ]
            text = "\n".join(prefixed)
            assert diagnose(text)[0].id == rule.id, (rule.id, other)
            silent = [replace(one, explains=frozenset()) for one in RULES.values()]
            assert diagnose(text, table=silent) != diagnose(text), (rule.id, other)


def test_harmless_lines_do_not_match() -> None:
    for rule in IDS:
        for line in RULES[rule].harmless:
            traceback = f"Traceback (most recent call last):\n  File 'a.py', line 3, in f\n{line}\n"
            for text in (line, traceback, f"[2] {line}\n[2] KeyError: 'lr'"):
                for ended in (None, 1):
                    assert rule not in [found.id for found in diagnose(text, ended)]


def test_a_near_miss_does_not_match() -> None:
    for rule in NEAR:
        assert rule not in answer(EXAMPLES / "near" / f"{rule}.log"), rule


def test_an_example_is_explained_in_a_log_of_ranks_and_in_a_notebook() -> None:
    for rule in IDS:
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


@pytest.mark.parametrize("platform", ["colab", "kaggle", "gcp"])
def test_fixes_for_a_platform_are_possible_there(platform: str) -> None:
    names = {"colab": "Kaggle", "kaggle": "Colab", "gcp": "Colab|Kaggle"}[platform]
    for rule in RULES.values():
        if platform in rule.fixes:
            text = " ".join(rule.steps(platform))
            assert not re.search(names, text), rule.id
            assert platform == "gcp" or not re.search(r"\b(?:sudo|gcloud|docker)\b", text), rule.id


PLAIN_PIP = re.compile(r"pip install [^.;]*(?:\btorch==|\btorch_xla(?:\[tpu\])?==)")
"""An install of torch other than doctor's: pip alone also downloads CUDA."""


@pytest.mark.parametrize("platform", [None, "colab", "kaggle", "gcp"])
def test_fixes_install_torch_with_doctors_command(platform: str | None) -> None:
    have = packages.read_installed()
    pair = packages.best_pair(platform or "")
    command = packages.install_command(pair, platform or "", tpu=True, have=have)
    for rule in ("abi-mismatch", "libtpu-missing", "libtpu-version-mismatch"):
        if (rule, platform) != ("abi-mismatch", "kaggle"):  # the image's own pair stays there
            assert f"`{command}`" in RULES[rule].steps(platform)[0]
    assert command.startswith(UV_INSTALL)
    for each in RULES.values():
        assert "{pair" not in " ".join(each.steps(platform))
        for step in each.fixes.get(platform or "any", ()):
            assert not PLAIN_PIP.search(step), each.id


def test_texts_of_a_rule_fit_on_a_screen_and_are_shown_whole() -> None:
    for rule in IDS:
        ended, text = read(EXAMPLES / f"{rule}.log")
        best = diagnose(text, ended)[0]
        shown = str(best)
        assert len(shown.split("\n")) <= 20, rule
        words = " ".join(shown.split())
        assert best.cause in words, rule
        assert all(step in words for step in best.steps), rule
        assert best.fix == " ".join(best.steps)
        assert words.endswith(best.link or best.steps[-1].split()[-1])
        assert all(len(line) <= 100 for line in shown.split("\n")), rule


def test_failures_that_people_reported_are_explained() -> None:
    reports = yaml.safe_load(REPORTS.read_text(encoding="utf-8"))
    assert len(reports) > 50
    for report in reports:
        found = diagnose(report["text"], report.get("ended", 1))
        assert [one.id for one in found][:1] == [report["rule"]], report
