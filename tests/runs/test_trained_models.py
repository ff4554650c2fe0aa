"""The comparison of the models that the ranks of a run ended with, and its words."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tpunb.runs.trained_models import DifferentModels, SteppedModel, find_difference, read_models
from tpunb.utils.files import write_json

PLACE = "cell [4], line 9: optimizer.step()"
MODEL = SteppedModel("3a", PLACE, alone=False, tolerance=1e-5, values=((3.0, 0.0), (4.0,)))


def model(*values: float, **changes: Any) -> SteppedModel:
    """A model whose first parameter has these values."""
    return replace(MODEL, values=(values or (3.0, 0.0), (4.0,)), **changes)


def compare(*models: SteppedModel) -> DifferentModels | None:
    return find_difference({rank: (each,) for rank, each in enumerate(models)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (model(), model()),
        (model(), model(3.0 + 1e-5, 0.0)),
        (model(), model(8.0, 0.0, identity="3b")),
        (replace(MODEL, values=((), (4.0,))), model(8.0, 0.0)),  # the first one had ended
        (replace(MODEL, values=()), MODEL),
        (model(alone=True), model()),
    ],
)
def test_models_that_are_equal_or_not_one_model(one: SteppedModel, other: SteppedModel) -> None:
    assert compare(other, one) is None


def test_models_of_ranks_that_left_none_are_not_compared() -> None:
    assert find_difference({}) is None
    assert find_difference({0: (MODEL,)}) is None
    assert find_difference({0: (MODEL,), 1: (model(8.0, 0.0),), 2: ()}) is None


def test_different_models_name_the_ranks_that_differ_most() -> None:
    found = compare(MODEL, model(3.0, 0.1), MODEL, model(0.0, 0.0))
    assert found == DifferentModels(PLACE, alone=False, ranks=(0, 3), difference=0.6)
    two = {0: (MODEL, MODEL), 1: (model(3.0, 0.1), model(0.0, 0.0))}
    assert find_difference(two) == replace(found, ranks=(0, 1))


def test_different_models_in_words() -> None:
    found = compare(MODEL, model(3.0, 0.1))
    assert found is not None
    assert found.describe(lambda rank: f"h1/{rank}").startswith(
        "the models of ranks h1/0 and h1/1 differ by 2.00% at the end; they were stepped at "
        f"{PLACE}\nto train one model, "
    )


@pytest.mark.parametrize(("values", "differ"), [((), False), ((0.0, 0.0), True)])
def test_ranks_that_trained_by_themselves(values: tuple[float, ...], differ: bool) -> None:
    found = compare(model(alone=True), model(*values, alone=True))
    assert found is not None
    assert found.alone
    assert found.describe().startswith(f"no rank had a process group at {PLACE}")
    assert ("differ by 60.00%" in found.describe()) == differ


def test_models_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    assert read_models(path) == ()
    write_json(path, [asdict(MODEL)])
    assert read_models(path) == (MODEL,)
    path.write_text(json.dumps([{**asdict(MODEL), "values": [None]}]))
    assert read_models(path) == ()
