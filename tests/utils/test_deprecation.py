"""Old names work for one release, with a warning at the line that uses them."""

from __future__ import annotations

import inspect
import operator

import pytest

from tpunb.utils.deprecation import renamed_arguments


@renamed_arguments(rest="remainder", trusted=("weights_only", operator.not_))
def example(*, remainder: str = "pad", weights_only: bool = True) -> tuple[str, bool]:
    return remainder, weights_only


def test_new_names_give_no_warning() -> None:
    assert example(remainder="drop", weights_only=False) == ("drop", False)
    assert list(inspect.signature(example).parameters) == ["remainder", "weights_only"]


def test_an_old_name_is_converted_with_a_visible_warning_at_the_callers_line() -> None:
    with pytest.warns(FutureWarning) as caught:
        assert example(rest="drop", trusted=True) == ("drop", False)  # type: ignore[call-arg]
    assert sorted(str(each.message).split(";")[0] for each in caught) == [
        "example(rest=) is now remainder=",
        "example(trusted=) is now weights_only=",
    ]
    assert {each.filename for each in caught} == {__file__}


def test_both_names_are_refused() -> None:
    with pytest.raises(
        TypeError, match="example: rest was renamed to remainder: give only one of them"
    ):
        example(rest="drop", remainder="pad")  # type: ignore[call-arg]
