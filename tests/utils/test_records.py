"""JSON that another program wrote."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import pytest

from tpunb.runs.spec import StopCause
from tpunb.utils import records


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"note": "a\ud800b"}', {"note": "a?b"}),
        (rb'["\udc80", {"\uDFFF": 1}]', ["?", {"?": 1}]),
        ('["\udc80"]', ["?"]),
        (b'["\xed\xa0\x80"]', ["?"]),
        (r'["\ud83d\ude00", "\u00fc"]', ["\U0001f600", "\u00fc"]),
    ],
)
def test_half_a_character_is_replaced(text: str | bytes, value: object) -> None:
    assert records.parse(text) == value


def test_what_is_nested_too_deeply_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        records.parse("[" * 100_000)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_than_utf_8_are_no_json(encoding: str) -> None:
    with pytest.raises(ValueError, match=r"decode|Expecting"):
        records.parse(r'["a\ud800"]'.encode(encoding))
    assert records.parse(b"\xef\xbb\xbf[1]") == [1]


@dataclass(frozen=True)
class _Record:
    text: str = ""
    cause: StopCause = StopCause.USER
    number: int = 0


@pytest.mark.parametrize("field", ["text", "cause", "number"])
def test_values_that_can_be_parsed_but_not_printed_are_refused(field: str) -> None:
    def nested(depth: int) -> str:
        return f'{{"{field}": ' + '{"":' * depth + "0" + "}" * (depth + 1)

    def is_refused(depth: int) -> bool:
        try:
            records.parse(nested(depth))
        except ValueError:
            return True
        return False

    deepest = bisect_left(range(100_000), True, key=is_refused)
    values = [nested(depth) for depth in range(max(deepest - 50, 1), deepest + 10)]
    for value in (*values, f'{{"{field}": {10**4000}}}'):
        with pytest.raises(ValueError, match=r"nested too deeply|is not of type"):
            records.build(_Record, records.parse(value))
