from __future__ import annotations

from tpunb.diagnosis import telling_lines


def test_the_exception_lines_of_tracebacks_come_before_lines_that_only_say_error() -> None:
    steps = [f"[0] step {n} error rate 0.{n}" for n in range(50)]
    text = "\n".join(
        [
            *steps,
            "[1] Traceback (most recent call last):",
            '[1]   File "train.py", line 3, in <module>',
            "[1] KeyError: 'lr'",
            "F0000 00:00:1.2 7 unknown.cc:9] Check failed: a == b",
        ]
    )
    lines = telling_lines(text, most=3)
    assert lines[1:] == ["KeyError: 'lr'", "F0000 00:00:1.2 7 unknown.cc:9] Check failed: a == b"]
    assert len(lines) == 3


def test_warnings_are_not_exceptions() -> None:
    text = "UserWarning: old\nDeprecationWarning: older\nmypackage.errors.OddError: now\ndone\n"
    assert telling_lines(text) == ["mypackage.errors.OddError: now"]


def test_exceptions_of_packages_need_not_be_called_errors() -> None:
    assert telling_lines("step 1\nzipfile.BadZipFile: no zip\npkg.OldWarning: x\n") == [
        "zipfile.BadZipFile: no zip"
    ]


def test_equal_lines_are_shown_once_and_the_order_is_that_of_the_log() -> None:
    text = "[0] ValueError: b\n[1] ValueError: b\nwhat(): a\n" * 3
    assert telling_lines(text) == ["ValueError: b", "what(): a"]


def test_without_any_sign_the_last_lines_tell_most() -> None:
    assert telling_lines("one\ntwo\n\nthree\n", most=2) == ["two", "three"]
    assert telling_lines("") == []


def test_a_very_long_line_is_cut() -> None:
    assert max(map(len, telling_lines("ValueError: " + "x" * 100_000))) <= 300
