"""The output budget: first lines, and the newest lines."""

from __future__ import annotations

import json

import nbformat
from hypothesis import given
from hypothesis import strategies as st
from nbformat import v4

from tpunb.display.output_budget import FIRST, LINE, MESSAGE, MOST, NEWEST, ROOM, OutputBudget


def written_by(texts: list[str], room: int | None, message: int = 0) -> tuple[OutputBudget, str]:
    written: list[str] = []
    budget = OutputBudget(written.append, room=room, message=message)
    for text in texts:
        budget.add(text)
    return budget, "".join(written)


def test_without_a_limit_all_is_written() -> None:
    text = "x" * 99 + "\n"
    budget, written = written_by([text] * 10_000, None)
    assert written == text * 10_000
    assert not budget.is_limited
    assert not budget.newest


def test_the_first_lines_are_written_and_the_newest_kept() -> None:
    budget, written = written_by([f"{n}\n{n} again\n" for n in range(5_000)], ROOM)
    first = written.splitlines()
    lines = [line for n in range(5_000) for line in (f"{n}", f"{n} again")]
    assert first == lines[: len(first)]
    assert len(first) == FIRST
    assert list(budget.newest) == lines[-NEWEST:]


def test_important_text_is_written_even_without_room() -> None:
    written: list[str] = []
    budget = OutputBudget(written.append, room=0)
    budget.add("a\nb\n")
    budget.write_always("a note\n")
    budget.write_always("")
    assert (written, list(budget.newest)) == (["a note\n"], ["a", "b"])


def test_the_newest_lines_are_short_together_and_one_is_always_there() -> None:
    budget, _ = written_by(["x" * 1_500 + "\n"] * 50, 0)
    assert len(budget.newest) == MOST // 1_500
    budget, _ = written_by(["y" * 2 * MOST + "\n"], 0)
    assert len(budget.newest) == 1


@given(st.lists(st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1)))
def test_the_file_takes_no_more_than_there_is_room(chunks: list[list[str]]) -> None:
    texts = ["".join(f"{line}\n" for line in lines if "\n" not in line) for lines in chunks]
    _, written = written_by(texts, 400)
    assert "".join(texts).startswith(written)
    lines = written.split("\n")[:-1]
    assert sum(len(line.encode()) + LINE for line in lines) <= 400


def test_the_costs_of_a_line_and_of_a_message_match_nbformat() -> None:
    def size(*texts: str) -> int:
        outputs = [v4.new_output("stream", name="stdout", text=text) for text in texts]
        cell = v4.new_code_cell("x", outputs=outputs)
        book = v4.new_notebook(cells=[cell])
        nbformat.validate(book)
        return len(nbformat.writes(book).encode())

    line = "\x1b[1mstep 1\x1b[0m\n"
    per_line = size(line * 101) - size(line)
    escaped = len(json.dumps(line)) - len(line) - 2
    assert per_line <= 100 * (len(line) + LINE + escaped)
    assert per_line >= 100 * (len(line) + LINE // 2)
    per_message = size(*["a\n"] * 101) - size("a\n")
    assert per_message <= 100 * (2 + LINE + MESSAGE)
    assert per_message >= 100 * (2 + LINE + MESSAGE) // 2
