"""A node's stream packed into a log: each line arrives once, whatever the log does to it."""

from __future__ import annotations

import random

import pytest

from tpunb.places import log_stream
from tpunb.places.log_stream import Packer, Unpacker, shown
from tpunb.runs.stream import Append, End, Line, Replace

LINES: list[Line] = [
    Append("run.log", 0, b"[0] tpunb~0~ is in the log\n" * 50, 1.0),
    Replace("attempts/0/0/numbers.json", b"{}", 2.0),
    Append("events.jsonl", 0, bytes(range(256)), 3.0),
    End(0),
]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_stream, "EVERY", 0.0)


def packed(*lines: Line) -> list[str]:
    """Pack each line on its own, after the text for people."""
    packer = Packer()
    texts = []
    for line in lines:
        packer.add(line)
        texts += [shown(line, "run.log"), packer.due(last=True)]
    return texts


def test_printed_text_between_packets_hides_no_line() -> None:
    unpacker = Unpacker()
    texts = ["tpunb~7~abc\n", "tpunb~", "tpunb~9~", *packed(*LINES), "tpunb~"]
    assert [line for text in texts for line in unpacker.feed(text)] == LINES
    assert unpacker.missing == 0


@pytest.mark.parametrize("seed", range(5))
def test_log_stream_pieces_of_any_size(seed: int) -> None:
    text = "".join(packed(*LINES))
    draw = random.Random(seed)
    unpacker = Unpacker()
    got: list[Line] = []
    while text:
        size = draw.choice([1, 7, 100, 5000])
        piece, text = text[:size], text[size:]
        # A log may break lines, and may drop the ends of lines.
        got += unpacker.feed(piece.replace("\n", "") if draw.random() < 0.3 else piece + "\n")
    assert got == LINES
    assert unpacker.missing == 0


def test_log_stream_that_restarts_gives_each_line_once() -> None:
    texts = packed(*LINES)
    unpacker = Unpacker()
    assert [line for text in texts[:3] for line in unpacker.feed(text)] == LINES[:1]
    assert list(unpacker.feed(texts[3][:10])) == []
    unpacker.again()
    assert [line for text in texts for line in unpacker.feed(text)] == LINES[1:]
    unpacker.again()
    assert [line for text in texts for line in unpacker.feed(text)] == []


def test_log_stream_lines_of_another_version_are_skipped() -> None:
    packer = Packer()
    packer.add(End(0))
    packer._waiting = {1: b'{"kind": "of a later version"}\n', **packer._waiting}
    assert list(Unpacker().feed(packer.due(last=True))) == [End(0)]


def test_log_stream_missing_packets_are_counted() -> None:
    texts = [text for text in packed(*LINES) if text.startswith("tpunb~")]
    texts[1] = texts[1].replace(texts[1][12:15], "zzz")
    unpacker = Unpacker()
    assert [line for text in texts for line in unpacker.feed(text)] == [LINES[0], *LINES[2:]]
    assert unpacker.missing == 1


def test_log_stream_sends_only_the_last_replacement_of_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packer, pulse = Packer(), "attempts/0/0/pulse"
    for number in range(3):
        packer.add(Replace("result.json", b"%d" % number))
        packer.add(Replace(pulse, b"%d" % number))
    unpacker = Unpacker()
    assert [line.data for line in unpacker.feed(packer.due()) if isinstance(line, Replace)] == [
        b"2",
        b"2",
    ]
    packer.add(Replace(pulse, b"3"))
    assert packer.due() == ""
    packer.add(Replace("result.json", b"3"))
    assert list(unpacker.feed(packer.due())) == [Replace("result.json", b"3")]
    assert list(unpacker.feed(packer.due(last=True))) == [Replace(pulse, b"3")]


def test_log_stream_waits_between_two_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(log_stream, "EVERY", 2.0)
    monkeypatch.setattr(log_stream.time, "monotonic", lambda: now[0])
    packer = Packer()
    packer.add(LINES[0])
    assert packer.due()
    packer.add(LINES[1])
    now[0] += 1.9
    assert not packer.due()
    now[0] += 0.2
    assert packer.due()
    assert not packer.due(last=True)
