"""The comparison of the models that the ranks of a run ended with, and its words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tpunb.runs.spec import BackendName, ModelsCause
from tpunb.runs.trained_models import (
    DifferentModels,
    SteppedModel,
    SteppedParameter,
    find_difference,
    read_models,
    write_models,
)

WEIGHT = SteppedParameter("model.weight", (2, 3), 1e-5, (1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
MODEL = SteppedModel(
    optimizer="SGD",
    place="cell [4], line 9: optimizer.step()",
    rates=(0.1,),
    alone=False,
    parts=False,
    collected=False,
    parameters=(WEIGHT,),
)


def model(*values: float | None, **changes: Any) -> SteppedModel:
    """A model whose first values are these."""
    weight = replace(WEIGHT, values=(*values, *WEIGHT.values[len(values) :]))
    return replace(MODEL, parameters=(weight,), **changes)


def compare(*models: SteppedModel) -> DifferentModels | None:
    return find_difference({rank: (each,) for rank, each in enumerate(models)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (model(), model()),
        (model(1.0), model(1.0 + 5e-6)),
        (model(None), model(None)),
        (model(), model(8.0, place="cell [4], line 12: optimizer.step()")),
        (model(), model(8.0, optimizer="Adam")),
        (model(), replace(MODEL, parameters=(replace(WEIGHT, name="critic.weight"),))),
        (model(), replace(MODEL, parameters=(replace(WEIGHT, shape=(3, 2), values=(9.0,) * 6),))),
        (model(collected=True), model(8.0, collected=True)),
        (model(alone=True), model(8.0, alone=True, rates=(0.2,))),  # trials
        (model(alone=True), model()),
    ],
)
def test_models_that_are_equal_or_not_one_model(one: SteppedModel, other: SteppedModel) -> None:
    assert compare(one, other) is None


def test_models_of_ranks_that_left_none_are_not_compared() -> None:
    assert find_difference({}) is None
    assert find_difference({0: (model(),)}) is None
    assert find_difference({0: (model(),), 1: (model(8.0),), 2: ()}) is None


def test_different_models_name_the_largest_difference() -> None:
    bias = SteppedParameter("model.bias", (), 1e-5, (0.0,))
    first = replace(MODEL, parameters=(WEIGHT, bias))
    second = replace(model(1.1), parameters=(*model(1.1).parameters, bias))
    third = replace(MODEL, parameters=(WEIGHT, replace(bias, values=(0.5,))))
    found = compare(first, first, second, third)
    assert found is not None
    assert (found.parameter, found.ranks, found.values) == ("model.bias", (0, 3), (0.0, 0.5))
    found = compare(first, second)
    assert found is not None
    assert (found.parameter, found.values) == ("model.weight[0, 0]", (1.0, 1.1))
    found = compare(MODEL, model(1.0, 2.0, 3.0, None))
    assert found is not None
    assert (found.parameter, found.values) == ("model.weight[1, 0]", (4.0, None))


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ({}, {}, ModelsCause.DIFFERENT),
        ({"parts": True}, {"parts": True}, ModelsCause.PARTS),
        ({"parts": True}, {}, ModelsCause.DIFFERENT),
        ({"alone": True}, {}, ModelsCause.DIFFERENT),
        ({"alone": True}, {"alone": True}, ModelsCause.ALONE),
    ],
)
def test_different_models_and_what_is_known_of_the_reason(
    one: dict[str, Any], other: dict[str, Any], cause: ModelsCause
) -> None:
    found = compare(model(**one), model(8.0, **other))
    assert found is not None
    assert found.cause is cause
    assert found.expected == (cause is ModelsCause.PARTS)


def test_ranks_that_trained_equal_models_by_themselves() -> None:
    alone = model(alone=True)
    found = compare(alone, alone)
    assert found is not None
    assert (found.cause, found.values) == (ModelsCause.ALONE, ())
    assert find_difference({0: (alone,), 1: (alone, replace(alone, alone=False))}) is None


def test_a_mistake_is_reported_before_what_may_be_intended() -> None:
    intended = {"parts": True, "optimizer": "Adam"}
    found = find_difference(
        {0: (model(**intended), model()), 1: (model(8.0, **intended), model(9.0))}
    )
    assert found is not None
    assert found.values == (1.0, 9.0)


def described(one: SteppedModel, other: SteppedModel, backend: BackendName = "xla") -> str:
    found = compare(one, other)
    assert found is not None
    return found.describe(backend, lambda rank: f"h1/{rank}")


@pytest.mark.parametrize("backend", get_args(BackendName))
def test_advice_on_different_models_is_of_the_backend(backend: BackendName) -> None:
    text = described(model(), model(1.25), backend)
    assert ("xm." in text) == (backend == "xla")
    assert ("dist." in text) == (backend != "xla")


def test_different_models_in_words() -> None:
    assert described(model(), model(1.25)).startswith(
        "at the end model.weight[0, 0] is 1 on rank h1/0 and 1.25 on rank h1/1; it was stepped at "
        "cell [4], line 9: optimizer.step()\nto train one model, "
    )
    assert "is 1 on rank h1/0 and 1.00049 on rank h1/1" in described(model(), model(1.00049))
    assert "is 1 on rank h1/0 and not finite on rank" in described(model(), model(None))
    assert "as ranks do that hold parts of" in described(model(parts=True), model(8.0, parts=True))
    alone = described(model(alone=True), model(alone=True), "torch")
    assert alone.startswith("no rank had a process group at cell [4], line 9: optimizer.step()")
    assert "at the end" not in alone
    assert "at the end" in described(model(alone=True), model(8.0, alone=True), "torch")


def test_models_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    assert read_models(path) == ()
    write_models(path, [model(None, -0.0)])
    assert read_models(path) == (model(None, -0.0),)
    assert math.nan not in json.loads(path.read_text())
    path.write_text(path.read_text()[:-9])
    assert read_models(path) == ()
