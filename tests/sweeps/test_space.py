"""The search space of a sweep: values, ranges, and errors for wrong ones."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from tpunb.errors import TpunbError
from tpunb.sweeps import space
from tpunb.sweeps.space import Choice, Range

KNOWN = {"lr": 0.1, "depth": 3, "name": "sgd", "fast": False, "none": None, "pair": (0, 1)}


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("lr", "1e-3,1", (1e-3, 1.0)),
        ("depth", "0..3,7,3", (0, 1, 2, 3, 7)),
        ("name", "adam,1", ("adam", "1")),
        ("name", "'a,b',c", ("a,b", "c")),
        ("fast", "True,False", (True, False)),
        ("name", "a..b,0.1..1", ("a..b", "0.1..1")),
        ("other", "../data", ("../data",)),
        ("none", "1,x,None", (1, "x", None)),
        ("other", "[1, 2],(3)", ([1, 2], 3)),
        ("pair", "(1, 2),[3, 4]", ([1, 2], [3, 4])),
    ],
)
def test_a_grid(name: str, text: str, values: tuple[Any, ...]) -> None:
    parsed = space.parse_grid(name, text, KNOWN).values
    assert parsed == values
    assert list(map(type, parsed)) == list(map(type, values))


@pytest.mark.parametrize(
    ("name", "text", "made"),
    [
        ("lr", "1e-5..1e-2:log", Range(1e-5, 1e-2, True)),
        ("lr", "1..2", Range(1.0, 2.0)),
        ("depth", "1..8", Range(1, 8)),
        ("other", "-0.5..1.5", Range(-0.5, 1.5)),
        ("name", "adam,sgd", Choice(("adam", "sgd"))),
    ],
)
def test_a_range(name: str, text: str, made: Choice | Range) -> None:
    parsed = space.parse_space(name, text, KNOWN)
    assert parsed == made
    assert not isinstance(made, Range) or parsed.to_json() == made.to_json()


@pytest.mark.parametrize(
    ("grid", "ranges", "said"),
    [
        ({"depth": "1,1.5"}, {}, "--grid depth=1.5: the notebook's default is 3, so depth is an"),
        ({"fast": [1]}, {}, "grid fast=1: the notebook's default is False"),
        ({"lr": "3..1"}, {}, "--grid lr=3..1: the first number must be the lower one"),
        ({"lr": "0.1..0.5"}, {}, "--grid lr=0.1..0.5: `..` is only for integers"),
        ({"other": "0..5e-1"}, {}, "write --grid other=0,…,5e-1, or --space other=0..5e-1 with"),
        ({}, {"other": "1,0.1..0.5"}, "--space other=0.1..0.5: `..` is only for integers"),
        ({"lr": ","}, {}, "--grid lr=, has no values"),
        ({"none": "{1}"}, {}, "a parameter must be a number, a string"),
        ({"lr": []}, {}, "grid of lr: the list has no values"),
        ({}, {"lr": []}, "space of lr: the list has no values"),
        ({}, {"lr": 3}, "space of lr: 3 is not a list of values"),
        ({}, {"fast": [1]}, "space fast=1: the notebook's default is False"),
        ({"lr": [{1}]}, {}, "a parameter must be a number, a string"),
        ({}, {"lr": "2..1"}, "--space lr=2..1: the first number must be the lower one"),
        ({}, {"lr": "0..1:log"}, "--space lr=0..1:log: a logarithmic range must begin above 0"),
        ({}, {"depth": "1..2.5"}, "--space depth=2.5: the notebook's default is 3"),
        ({}, {"lr": ("a", 2)}, "--space lr=a..2: the ends of a range must be numbers"),
        ({"lr": "1"}, {"lr": "1..2"}, "lr is both in the grid and in the space"),
    ],
)
def test_wrong_values_are_refused(grid: dict[str, Any], ranges: dict[str, Any], said: str) -> None:
    with pytest.raises(TpunbError, match=re.escape(said)):
        space.from_python(grid, ranges, KNOWN)


def test_a_repeated_name_is_refused() -> None:
    with pytest.raises(TpunbError, match="--grid lr is given twice"):
        space.by_name([("lr", "1"), ("lr", "2")], "--grid")


def test_all_combinations_and_too_many() -> None:
    made = space.from_python({"lr": [1, 2], "depth": range(2)}, {}, KNOWN)
    assert space.grid_trials(made) == [
        {"lr": lr, "depth": depth} for lr, depth in itertools.product((1.0, 2.0), (0, 1))
    ]
    many = space.from_python({"lr": range(200), "depth": range(200)}, {}, KNOWN)
    with pytest.raises(TpunbError, match=r"40,000 trials, more than 10,000: .*--random N"):
        space.grid_trials(many)
    with pytest.raises(TpunbError, match="--random N or --search N"):
        space.grid_trials({"lr": Range(0.0, 1.0)})


def test_random_trials_are_reproducible_and_within_their_ranges() -> None:
    drawn = {
        "log": Range(1e-5, 1e-2, True),
        "whole": Range(1, 64, True),
        "flat": Range(2, 3),
        "one": Choice(("a", "b")),
    }
    trials = list(itertools.islice(space.random_trials(drawn, "seed"), 400))
    assert trials[:7] == list(itertools.islice(space.random_trials(drawn, "seed"), 7))
    assert all(1e-5 <= trial["log"] <= 1e-2 and 1 <= trial["whole"] <= 64 for trial in trials)
    assert {trial["flat"] for trial in trials} == {2, 3}
    # Equal factors are equally likely: a third of three decades each.
    lowest = sum(trial["log"] < 1e-4 for trial in trials)
    assert 80 < lowest < 190
    assert len(list(space.random_trials({"one": Choice((1, 2, 3))}, "s"))) == 3
