"""JSON that another program wrote."""

from __future__ import annotations

import pytest

from tpunb.utils import records


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"note": "a\ud800b"}', {"note": "a?b"}),
        (rb'["\udc80", {"\uDFFF": 1}]', ["?", {"?": 1}]),
        ('["\udc80"]', ["?"]),
        (r'["\ud83d\ude00", "\u00fc"]', ["\U0001f600", "\u00fc"]),
    ],
)
def test_half_a_character_is_replaced(text: str | bytes, value: object) -> None:
    assert records.parse(text) == value


def test_what_is_nested_too_deeply_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        records.parse("[" * 100_000)
