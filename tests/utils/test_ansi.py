"""Pieces of text become whole, clean lines."""

from __future__ import annotations

import io
import re
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from tests.support import examples
from tpunb.utils.ansi import LONGEST, Lines, strip_ansi

RED, RESET = "\x1b[31m", "\x1b[0m"


def whole(text: str) -> list[str]:
    """Return all lines of a text that is fed in one piece."""
    lines = Lines()
    return lines.feed(text) + lines.rest()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a\nb\n", ["a", "b"]),
        ("  \n   ", ["  "]),
        ("tab\tstays\n", ["tab\tstays"]),
        # carriage returns
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\r\r\n", ["a"]),
        ("aaa\rbb\rc", ["c"]),
        ("\r 0%\r 50%\r100%\ndone\n", ["100%", "done"]),
        ("\r 50%\r     \rdone\n", ["done"]),
        # colours stay, and end with their line
        (f"{RED}red{RESET} text\n", [f"{RED}red{RESET} text{RESET}"]),
        (f"{RED}red\nplain\n", [f"{RED}red{RESET}", "plain"]),
        ("\x1b[38;2;1;2;3mrgb\x1b[m\n", ["\x1b[38;2;1;2;3mrgb\x1b[m" + RESET]),
        # everything else that steers a terminal goes
        ("\x1b[2K\x1b[1Gtext\x1b[K\n", ["text"]),
        ("\x1b]0;title\x07text\n", ["text"]),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ after\n", ["link after"]),
        ("\x1b(Btext\x1b=\x1b7\n", ["text"]),
        ("bell\x07 back\x08 null\x00 form\x0c c1\x9b\n", ["bell back null form c1"]),
        ("cut short \x1b[3", ["cut short "]),
        ("cut short \x1b]0;tit\n", ["cut short "]),
        # not line ends
        ("a\x0bb\x85c\u2028d\n", ["abc\u2028d"]),
        ("ünïcödé 漢字 🎉\n", ["ünïcödé 漢字 🎉"]),
    ],
)
def test_text_to_lines(text: str, expected: list[str]) -> None:
    assert whole(text) == expected


PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            [
                *("\n", "\r", "\r\n", "\x1b", "\x1b[A", "\x1b[2A", "\x1b[K"),
                *(RED, RESET, "\x1b]0;", "\x07"),
            ]
        ),
        st.text(alphabet="ab[A0;漢 \t\x08", max_size=6),
        st.integers(1, 40).map(lambda n: "long " * (n * 100)),
    ),
    max_size=30,
)
TEXT = PIECES.map("".join)


@example(pieces=["a\r", "b\n"])
@example(pieces=[f"{RED}\x1b[A", "above\n\n"])
@settings(max_examples=examples(300))
@given(pieces=PIECES)
def test_how_the_text_is_split_makes_no_difference(pieces: list[str]) -> None:
    text = "".join(pieces)
    expected = whole(text)
    characters = text if len(text) < 2_000 else re.findall(r"(?s).{1,7}", text)
    for split in (pieces, characters):
        lines = Lines()
        found = [line for piece in split for line in lines.feed(piece)]
        assert found + lines.rest() == expected


@given(text=TEXT)
def test_lines_are_clean_and_short(text: str) -> None:
    for line in whole(text):
        shown = strip_ansi(line)
        assert len(shown.partition("… (+")[0]) <= LONGEST
        assert not [c for c in shown if ord(c) < 32 and c != "\t"]


@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=50)))
def test_plain_lines_come_out_as_they_went_in(lines: list[str]) -> None:
    assert Lines().feed("".join(f"{line}\n" for line in lines)) == lines


@pytest.mark.parametrize("length", [LONGEST, LONGEST + 1, 20_000, 100_000])
@pytest.mark.parametrize("before", ["", "one\n"])
@pytest.mark.parametrize("end", ["", "\n", "\nafter\n"])
def test_a_long_line_is_cut_and_the_rest_counted(length: int, before: str, end: str) -> None:
    lines = whole(before + "x" * length + end)
    line = lines[len(before.splitlines())]
    if length == LONGEST:
        assert line == "x" * length
    else:
        assert line == "x" * LONGEST + f"… (+{length - LONGEST:,} characters, whole in run.log)"


def test_colours_do_not_count_as_length() -> None:
    line = f"{RED}x{RESET}" * 10 + "x" * (LONGEST - 10) + RESET
    assert whole(line + "\n") == [line]
    assert whole(line + "yz\n") == ["x" * LONGEST + "… (+2 characters, whole in run.log)"]


def test_a_line_without_an_end_takes_little_memory() -> None:
    lines = Lines()
    for _ in range(1_000):
        assert lines.feed("x" * 10_000) == []
    assert len(lines._line._kept) < 20_000
    assert "(+9,998,000 characters" in lines.unfinished()


def test_an_unfinished_bar_is_known_as_one() -> None:
    lines = Lines()
    lines.feed("text")
    assert (lines.unfinished(), lines.is_bar) == ("text", False)
    lines.feed("\r 10%")
    assert (lines.unfinished(), lines.is_bar) == (" 10%", True)
    assert lines.feed("\r 20%\n") == [" 20%"]
    assert (lines.unfinished(), lines.is_bar) == ("", False)


def test_a_bar_of_tqdm_is_one_line() -> None:
    stream = io.StringIO()
    for _ in tqdm(range(50), file=stream, mininterval=0, ncols=60):
        pass
    assert stream.getvalue().count("\r") > 40
    (line,) = whole(stream.getvalue())
    assert line.startswith("100%")


@pytest.mark.parametrize("leave", [False, True])
def test_nested_bars_of_tqdm_are_lines_for_bars_and_not_for_steps(leave: bool) -> None:
    stream = io.StringIO()
    for _ in tqdm(range(3), desc="epochs", file=stream, mininterval=0, ncols=60):
        for _ in tqdm(range(50), "steps", file=stream, mininterval=0, ncols=60, leave=leave):
            time.sleep(0)
    stream.write("done\n" if not leave else "")
    assert stream.getvalue().count("\n") > 100
    lines = [line.partition("|")[0].strip() for line in whole(stream.getvalue())]
    assert lines[-2:] == ["epochs: 100%", "done"] if not leave else lines[-1] == "epochs: 100%"
    assert len(lines) < 10


def test_nested_bars_show_the_lowest_while_they_run() -> None:
    lines = Lines()
    assert lines.feed("\router 0%\n\rinner 1%\x1b[A") == ["outer 0%"]
    assert lines.feed("\n\rinner 2%\x1b[A") == []
    assert lines.unfinished() == "inner 2%"
    assert lines.feed("\router 50%\n\rinner 3%") == []
    assert lines.unfinished() == "inner 3%"


def test_what_is_written_after_coming_down_again_starts_the_line() -> None:
    lines = Lines()
    assert lines.feed("\router 0%\n\rinner 1%\x1b[A\nplain text\n") == ["outer 0%", "plain text"]


def test_two_levels_up_and_down_again() -> None:
    lines = Lines()
    assert lines.feed("\ra\n\rb\n\rc\x1b[A\x1b[A") == ["a", "b"]
    assert lines.feed("\n\n\rd\x1b[2A\n\n\re\n") == ["e"]
