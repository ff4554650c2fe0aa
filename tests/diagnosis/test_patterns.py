from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpunb.diagnosis.patterns import LinePattern, PatternError
from tpunb.diagnosis.table import rules


@pytest.mark.parametrize(
    ("source", "fixed"),
    [
        ("Socket closed", {"socket closed"}),
        (r"exit code \d+", {"exit code "}),
        ("shapes? of", {"shape"}),
        ("alpha|beta", {"alpha", "beta"}),
        ("(?:alpha|beta) x", {"alpha", "beta"}),
        ("(?:al|be) gamma", {" gamma"}),
        (r"a\.b\(c\)", {"a.b(c)"}),
        ("[abc]defg[)(]*", {"defg"}),
        ("(?:alpha)?delta{2}", {"delt"}),
        ("(?<!disk )quota", {"quota"}),
    ],
)
def test_fixed_text_of_a_pattern(source: str, fixed: set[str]) -> None:
    assert set(LinePattern.of(source).fixed) == fixed


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("a.*b", "needs 4 fixed characters"),
        ("fatal error|x", "needs 4 fixed characters"),
        ("(unclosed", "not a regular expression"),
    ],
)
def test_a_pattern_that_cannot_be_used_says_why(source: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        LinePattern.of(source)


def every_pattern() -> list[LinePattern]:
    signs = [sign for rule in rules() for sign in rule.signs]
    return [p for sign in signs for p in (sign.text, *sign.also, *sign.without) if p is not None]


ASCII = st.characters(codec="ascii")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_makes_looking_for_patterns_quick_loses_no_match(data: st.DataObject) -> None:
    pattern = data.draw(st.sampled_from(every_pattern()))
    line = data.draw(st.from_regex(re.compile(pattern.source, re.ASCII), alphabet=ASCII))
    assume(pattern.regex.search(line))
    assert any(text in line.lower() for text in pattern.fixed)
    if not pattern.digits:
        assert pattern.regex.search(re.sub("[0-9]", "0", line))
