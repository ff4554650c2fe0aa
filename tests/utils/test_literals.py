"""Plain values as Python source."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tpunb.utils import literals
from tpunb.utils.literals import literal, shown, simple

SCALARS = st.one_of(
    *(st.integers(), st.floats(), st.text(), st.booleans(), st.none(), st.binary()),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
)
KEYS = st.one_of(st.integers(), st.text(), st.tuples(st.booleans(), st.text()))
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_a_literal_makes_the_same_value_with_the_same_types(value: Any) -> None:
    text = literal(value)
    assert text is not None
    assert "\n" not in text
    made = eval(text, {})
    assert type(made) is type(value)
    assert literal(made) == text
    if value == value and "nan" not in text:
        assert made == value


@pytest.mark.parametrize(
    "value",
    [
        *(range(3), range(1, 9, 2), pathlib.Path("a/b"), pathlib.PurePosixPath("x")),
        *(math.inf, -math.inf, math.nan, "\udc80\0\n", np.float64(0.1), np.float32(0.1)),
        *(np.bool_(True), np.int8(3), np.str_("q"), np.array(3.5), torch.bfloat16),
        *(torch.tensor(0.1), torch.tensor(3), torch.tensor(0.1, dtype=torch.bfloat16)),
    ],
)
def test_values_of_libraries(value: Any) -> None:
    text = literal(value)
    assert text is not None
    made = eval(text, {})
    assert type(made) is type(value)
    assert literal(made) == text
    assert getattr(made, "dtype", None) == getattr(value, "dtype", None)


def test_types_count() -> None:
    assert len({literal(value) for value in (1, 1.0, True, np.int64(1), torch.tensor(1))}) == 5
    assert literal({2, 1}) == literal({1, 2})
    assert literal({"a": 1, "b": 2}) != literal({"b": 2, "a": 1})


def test_what_is_not_plain() -> None:
    class Text(str):
        pass

    endless: list[Any] = []
    endless.append(endless)
    large = list(range(literals.MOST_ITEMS + 1))
    of_libraries = (
        np.zeros(1),
        torch.zeros(1),
        torch.zeros((), requires_grad=True),
        np.dtype("f4"),
    )
    own = (Text("x"), [Text("x")], object(), print, Text, endless)
    for value in (
        *own,
        *of_libraries,
        large,
        "x" * (literals.LONGEST + 1),
        1 << 5000,
        b"x" * 30000,
    ):
        assert literal(value) is None


def test_as_people_and_tables_have_them() -> None:
    assert shown('__import__("numpy").float64(0.1)') == "numpy.float64(0.1)"
    assert len(shown(repr("x" * 500))) == 60
    values = (0.1, True, None, "x", math.inf, -3, np.float32(0.5), torch.tensor(2.0))
    assert [simple(str(literal(value))) for value in values] == [
        *(0.1, True, None, "x", math.inf, -3, 0.5, 2.0)
    ]
    assert simple("[1, 2]") == "[1, 2]"
