from __future__ import annotations

import json
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support import examples
from tpunb.diagnostics.failure.log import Log, compile_pattern
from tpunb.diagnostics.failure.rules import rules


def matches(text: str, pattern: str) -> list[str]:
    log = Log(text)
    return [log.bodies[number] for number in log.all.find(compile_pattern(pattern))]


def test_colours_and_progress_bars_do_not_hide_a_line() -> None:
    text = "\x1b[1;31mKilled\x1b[0m\r 10%|█ | 1/9\r 20%|██ | 2/9\rKilled\r\nKilled\n"
    assert matches(text, "^Killed$") == ["Killed"] * 3


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("[3] Killed", 3),
        ("[12 err] Killed", 12),
        ("[rank3]: Killed", 3),
        ("[default7]:Killed", 7),
        ("rank 3: Killed", 3),
        ("[prelude] Killed", None),
        ("Killed", None),
    ],
)
def test_prefixes_of_ranks_are_read_and_left_out(line: str, rank: int | None) -> None:
    log = Log(line)
    assert log.rank(0) == rank
    if rank is not None:
        assert log.all.find(compile_pattern("^Killed$")) == [0]


def test_matches_are_in_the_order_of_the_log_whatever_alternative_they_are_of() -> None:
    text = "beta 1\nalpha 1\nbeta 2\nalpha 2\n"
    assert matches(text, "alpha|beta") == text.split("\n")[:4]


def test_upper_and_lower_case_are_alike() -> None:
    assert matches("RUNTIME IS ALREADY INITIALIZED", "runtime is already") != []


def test_the_json_of_kaggles_logs_is_unpacked() -> None:
    parts = ["Traceback\nKey", "Error: 3\n"]
    log = json.dumps([{"stream_name": "stderr", "time": 1, "data": part} for part in parts])
    assert matches(log, "^KeyError") == ["KeyError: 3"]


def test_the_outputs_of_a_saved_notebook_are_read() -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["step 1\n", "Killed\n"]},
        {"output_type": "error", "traceback": ["Cell In[3], line 1", "\x1b[31mKeyError\x1b[0m: 3"]},
    ]
    notebook = {"nbformat": 4, "cells": [{"cell_type": "code", "outputs": outputs}]}
    text = json.dumps(notebook)
    assert matches(text, "^Killed") == ["Killed"]
    assert matches(text, "^KeyError") == ["KeyError: 3"]


def test_json_that_is_cut_off_is_read_as_text() -> None:
    assert matches('[{"stream_name": "stderr", "data": "Killed', "Killed") != []


def test_long_lines_are_cut_at_spaces_and_nothing_is_lost() -> None:
    words = " ".join(f"word{n}" for n in range(3000))
    log = Log(words)
    assert max(map(len, log.lines)) <= 2000
    assert "".join(log.lines) == words


def test_a_pattern_matches_within_one_line_only() -> None:
    text = "the moon\nis full\n\nKilled\nthe moon \n is full\n"
    assert matches(text, r"the moon\s+is full") == []
    assert matches(text, r"moon\W*$") == ["the moon", "the moon "]
    assert matches(text, r"^\W*Killed\W*$") == ["Killed"]


def every_pattern() -> list[re.Pattern[str]]:
    signs = [sign for rule in rules() for sign in rule.signs]
    return [one for sign in signs for line in (*sign.lines, *sign.context) for one in line]


ASCII = st.characters(codec="ascii")


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_search_in_all_lines_at_once_loses_no_match(data: st.DataObject) -> None:
    pattern = data.draw(st.sampled_from(every_pattern()))
    line = data.draw(st.from_regex(re.compile(pattern.pattern, re.ASCII), alphabet=ASCII))
    assume("\n" not in line and "\r" not in line and pattern.search(line))
    assert pattern.search(f"step 1\n{line}\nstep 2")
