"""Results of `tpunb.launch` in the kernel, as code for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tpunb.kernel.returned import Returned
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunState


def result(name: str, value: object) -> RunResult:
    returns = {"value": value}
    return RunResult(
        RunState.SUCCEEDED, name, 1, "CPU", 1.0, 2.0, Path("/runs", name), returns=returns
    )


WEIGHTS = {"w": torch.ones(3)}


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("first", "_tpunb_ended.read_run('/runs/first')"),
        (
            "first.returns['value']",
            "_tpunb_ended.read_run('/runs/first', 'value').returns['value']",
        ),
        (
            "[first, second]",
            "[_tpunb_ended.read_run('/runs/first'), _tpunb_ended.read_run('/runs/second')]",
        ),
        ("{0.1: first}", "{0.1: _tpunb_ended.read_run('/runs/first')}"),
        ("second.returns['value']", "3"),
        ("{'a': [1, None]}", "{'a': [1, None]}"),
        ("torch.ones(3)", None),
        ("[first, torch.ones(3)]", None),
    ],
)
def test_expression_that_rebuilds_launch_results_in_a_run(made: str, text: str | None) -> None:
    first, second = result("first", WEIGHTS), result("second", 3)
    returned = Returned()
    for each in (first, second):
        returned.add_launched(each)
    names: dict[str, Any] = {"first": first, "second": second, "torch": torch}
    expression = returned.left_by_launches({"it": eval(made, names)})
    assert expression("it") == text
    assert expression("other") is None


def test_launch_result_changed_by_the_notebook_has_no_expression() -> None:
    weights = {"w": torch.ones(3)}
    returned = Returned()
    returned.add_launched(result("first", weights))
    expression = returned.left_by_launches({"it": weights})
    assert expression("it") == "_tpunb_ended.read_run('/runs/first', 'value').returns['value']"
    weights["w"] = torch.ones(3)
    assert expression("it") is None


def test_launches_that_no_variable_holds_take_no_memory() -> None:
    returned = Returned()
    for _ in range(3):
        returned.add_launched(result("gone", 1))
    assert len(returned._launched) == 1
