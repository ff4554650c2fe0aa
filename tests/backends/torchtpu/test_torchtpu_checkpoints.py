"""Models of which each rank has a part on a rehearsed TPU: saved, and loaded in any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drivers.ranks import Ranks
from tests.training.checkpoint.test_sharded import saved_and_loaded


@pytest.mark.usefixtures("outside_run")
@pytest.mark.parametrize(("saved_on", "on"), [(2, 1), (2, 2), (2, 4), (4, 2)])
def test_sharded_models_of_torchtpu_are_saved_and_loaded_with_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, saved_on: int, on: int
) -> None:
    saved_and_loaded(ranks, tmp_path, "tpu", saved_on, on)
