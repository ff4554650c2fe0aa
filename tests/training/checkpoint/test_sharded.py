"""Models of which each rank has a part: `tpunb.save` writes all of it, for any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tpunb
from tests.drivers import sharded
from tests.drivers.ranks import Ranks
from tests.drivers.sharded import LAYOUTS, whole


def same(one: Any, other: Any) -> bool:
    """Equal up to rounding: ranks may add in another order."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return one == pytest.approx(other, rel=1e-3, abs=1e-5)
    return bool(one == other)


def saved_and_loaded(ranks: Ranks, folder: Path, device: str, saved_on: int, on: int) -> None:
    """Train and save in some ranks; load and go on in others, and load in this process."""
    layouts = list(LAYOUTS)
    saved, *_ = ranks.values(sharded.train, saved_on, str(folder), device, layouts)
    for layout, (state, _) in saved.items():
        assert any(map(any, state["model"]["first.weight"]))
        here = tpunb.load(folder / layout)
        assert here is not None
        assert whole(here.state) == state
    for found in ranks.values(sharded.go_on, on, str(folder), device, layouts):
        for layout, (step, loaded, after) in found.items():
            assert step == 1
            assert loaded == saved[layout][0], layout
            assert same(after, saved[layout][1]), layout


@pytest.mark.usefixtures("outside_run")
@pytest.mark.parametrize(("saved_on", "on"), [(2, 1), (2, 4), (4, 2)])
def test_sharded_models_are_saved_and_loaded_with_any_number_of_ranks(
    ranks: Ranks, tmp_path: Path, saved_on: int, on: int
) -> None:
    saved_and_loaded(ranks, tmp_path, "cpu", saved_on, on)


@pytest.mark.usefixtures("outside_run")
def test_sharded_models_of_a_training_state(ranks: Ranks, tmp_path: Path) -> None:
    losses = ranks.values(sharded.resumed_training, 2, str(tmp_path), "cpu")
    for without_a_stop, resumed in losses:
        assert resumed == without_a_stop


@pytest.mark.usefixtures("outside_run")
def test_sharded_model_that_only_rank_0_saves_is_no_checkpoint(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.values(sharded.save_in_rank_0, 2, str(tmp_path), "cpu")
    assert tpunb.load(tmp_path) is None
    assert "rank 1 (every rank must call tpunb.save" in capsys.readouterr().err


@pytest.mark.usefixtures("outside_run")
def test_sharded_values_that_cannot_be_saved_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for inside, partial in ranks.values(sharded.refused, 2, str(tmp_path), "cpu"):
        assert "TypeError: an object has a DTensor" in inside
        assert "Partial" in partial
    assert tpunb.load(tmp_path) is None
