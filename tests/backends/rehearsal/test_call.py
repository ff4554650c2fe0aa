"""Descriptions of collective calls."""

from __future__ import annotations

from tpunb.backends.rehearsal.call import RankCall, describe_mismatch, users_line


def test_collective_call_in_words() -> None:
    assert str(RankCall("rendezvous")) == "rendezvous"
    assert str(RankCall("rendezvous", label="'epoch'")) == "rendezvous 'epoch'"
    one = RankCall("all_reduce sum", ("float32[3]",), "scale 0.5")
    assert str(one) == "all_reduce sum of float32[3], scale 0.5"
    two = RankCall("all_reduce sum", ("float32[3]", "int64[]"))
    assert str(two) == "all_reduce sum of 2 tensors (float32[3], …)"


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


def test_mismatch_message_groups_ranks_that_agree() -> None:
    three, five = (
        RankCall("all_reduce sum", (f"float32[{n}]",), place="line 4 of train.py: f(x)")
        for n in (3, 5)
    )
    assert describe_mismatch({0: three, 1: five, 2: three}).splitlines() == [
        "the ranks called different collectives at the same time:",
        "  ranks 0, 2: all_reduce sum of float32[3]",
        "      line 4 of train.py: f(x)",
        "  rank 1: all_reduce sum of float32[5]",
        "      line 4 of train.py: f(x)",
        "Every rank must make the same collective calls, in the same order, with tensors of the "
        "same shapes and types. On a TPU this would hang or crash.",
    ]


def test_mismatch_message_names_the_first_different_tensor() -> None:
    calls = {
        rank: RankCall("all_reduce sum", ("float32[1]", kind, "float32[9]"))
        for rank, kind in enumerate(["float32[2]", "bfloat16[2]"])
    }
    message = describe_mismatch(calls)
    assert "rank 0: all_reduce sum of 3 tensors (float32[1], …), tensor 2 is float32[2]" in message
    assert "rank 1: all_reduce sum of 3 tensors (float32[1], …), tensor 2 is bfloat16[2]" in message
