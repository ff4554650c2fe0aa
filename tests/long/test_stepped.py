"""More programs whose ranks train one model."""

from __future__ import annotations

from pathlib import Path

from tests.drivers.ranks import Ranks
from tests.worker.test_stepped import EQUAL_BUT_SLOW, differences


def test_nothing_is_said_of_equal_models_of_more_kinds(ranks: Ranks, tmp_path: Path) -> None:
    found = differences(ranks, EQUAL_BUT_SLOW, tmp_path)
    assert {program: each for program, each in found.items() if each is not None} == {}
