"""Descriptions of collective calls."""

from __future__ import annotations

from tpunb.backends.rehearsal.call import RankCall, users_line


def test_collective_call_digest_covers_what_must_match() -> None:
    call = RankCall("all_reduce sum", ("float32[3]",), "scale 0.5")
    same = RankCall(
        "all_reduce sum", ("float32[3]",), "scale 0.5", label="other", place="elsewhere"
    )
    assert call.digest == same.digest
    for other in (
        RankCall("all_reduce min", ("float32[3]",), "scale 0.5"),
        RankCall("all_reduce sum", ("float32[4]",), "scale 0.5"),
        RankCall("all_reduce sum", ("float32[3]", "float32[3]"), "scale 0.5"),
        RankCall("all_reduce sum", ("float32[3]",), "scale 0.25"),
    ):
        assert call.digest != other.digest


def test_collective_call_description_keeps_the_user_line() -> None:
    call = RankCall("all_reduce sum", ("float32[3]", "int64[]"), "scale 0.5", "'é'")
    there = RankCall.from_description(call.described())
    assert (there.operation, there.tensors, there.detail, there.label) == (
        call.operation,
        call.tensors,
        call.detail,
        call.label,
    )
    assert there.place.startswith("line ")
    assert there.place.endswith(
        " of test_call.py: there = RankCall.from_description(call.described())"
    )


def test_user_line_of_code_without_a_file() -> None:
    code = compile("\nplace = users_line()", "<cell [7]>", "exec")
    namespace: dict[str, object] = {"users_line": users_line, "__name__": "__main__"}
    exec(code, namespace)
    assert namespace["place"] == "line 2 of <cell [7]>"
