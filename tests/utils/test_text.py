"""Equal lines of several ranks become one, and no rank's order changes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpunb.utils.text import describe_ranks, excerpt, fold, name_ranks, parse_ranks


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([2], "2"),
        ([0, 1], "0-1"),
        ([0, 2], "0,2"),
        ([3, 1, 0, 2], "0-3"),
        ([0, 1, 2, 5, 7, 8], "0-2,5,7-8"),
        (range(256), "0-255"),
    ],
)
def test_ranks_have_short_names(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name


def test_ranks_in_a_sentence() -> None:
    assert describe_ranks([2]) == "rank 2"
    assert describe_ranks({2: "a", 0: "b"}) == "ranks 0, 2"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, []),
        ({1: ["a", "b"]}, ["1 a", "1 b"]),
        ({0: ["a", "b"], 1: ["a", "b"]}, ["0-1 a", "0-1 b"]),
        ({0: ["a"], 2: ["a"], 1: ["b"]}, ["0,2 a", "1 b"]),
        # a line of one rank's own stands before the next that it shares
        (
            {0: ["a", "x0", "b"], 1: ["a", "x1", "b"], 2: ["a", "x2", "b"]},
            ["0-2 a", "0 x0", "1 x1", "2 x2", "0-2 b"],
        ),
        ({0: ["a", "b"], 1: ["b", "a"]}, ["0 a", "0-1 b", "1 a"]),
        ({0: ["a", "a"], 1: ["a"]}, ["0-1 a", "0 a"]),
        ({0: ["a"], 1: ["a", "a"]}, ["0-1 a", "1 a"]),
        ({0: [], 1: ["a"]}, ["1 a"]),
    ],
)
def test_fold(written: dict[int, list[str]], expected: list[str]) -> None:
    assert [f"{name_ranks(ranks)} {line}" for line, ranks in fold(written)] == expected


@given(
    st.dictionaries(
        st.integers(0, 7), st.lists(st.sampled_from(["a", "b", "c", "d", ""]), max_size=12)
    )
)
def test_every_line_of_every_rank_comes_once_and_in_its_order(
    written: dict[int, list[str]],
) -> None:
    folded = fold(written)
    for rank, lines in written.items():
        assert [line for line, ranks in folded if rank in ranks] == lines
    assert all(len(set(ranks)) == len(ranks) > 0 for _, ranks in folded)


@given(st.lists(st.text(max_size=3), max_size=30), st.integers(1, 8))
def test_ranks_that_wrote_the_same_fold_completely(lines: list[str], ranks: int) -> None:
    folded = fold(dict.fromkeys(range(ranks), lines))
    assert folded == [(line, list(range(ranks))) for line in lines]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", {0, 1, 2, 3, 4, 5}),
        ("none", set()),
        ("0", {0}),
        ("0,3-5", {0, 3, 4, 5}),
        (" 1 - 2 , 2", {1, 2}),
        ("ALL", {0, 1, 2, 3, 4, 5}),
    ],
)
def test_parse_ranks(text: str, ranks: set[int]) -> None:
    assert parse_ranks(text, 6) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' does not name ranks: use all, none, or ranks from 0 to 5"),
        ("0,,1", "does not name ranks"),
        ("-1", "does not name ranks"),
        ("1-", "does not name ranks"),
        ("two", "'two' does not name ranks"),
        ("6", "there is no rank 6: use all, none, or ranks from 0 to 5"),
        ("0-9", "there is no rank 9"),
        ("3-1", "'3-1' counts downwards"),
    ],
)
def test_parse_ranks_says_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_ranks(text, 6)


@pytest.mark.parametrize(
    ("around", "kept"),
    [(0, "012345678…"), (4, "…3456789a…"), (35, "…rstuvwxyz")],
)
def test_a_long_line_is_cut_with_a_mark(around: int, kept: str) -> None:
    line = "0123456789abcdefghijklmnopqrstuvwxyz"
    assert excerpt(line, 10, around=around) == kept
    assert excerpt(line, 36, around=around) == line
