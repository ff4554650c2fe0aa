"""More programs whose ranks train one model."""

from __future__ import annotations

from pathlib import Path

from tests.drivers.ranks import Ranks
from tests.worker.test_stepped import EQUAL_BUT_SLOW, differences


def test_no_difference_of_equal_models_of_more_kinds(ranks: Ranks, tmp_path: Path) -> None:
    assert differences(ranks, EQUAL_BUT_SLOW, tmp_path) == dict.fromkeys(EQUAL_BUT_SLOW)
