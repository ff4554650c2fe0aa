"""Fixtures: a small run to show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import RunSpec

MakeSpec = Callable[..., RunSpec]
MakeResult = Callable[..., RunResult]


@pytest.fixture
def make_spec() -> MakeSpec:
    def make(**changes: Any) -> RunSpec:
        values: dict[str, Any] = {
            "id": "20260102-030405-digits",
            "name": "digits",
            "world_size": 4,
            "device": "CPU",
            "cwd": "/",
            "sys_path": (),
            "blocks": (),
        }
        return RunSpec(**(values | changes))

    return make


@pytest.fixture
def make_result(tmp_path: Path) -> MakeResult:
    def make(state: str = "succeeded", **changes: Any) -> RunResult:
        values: dict[str, Any] = {
            "state": state,
            "name": "digits",
            "world_size": 4,
            "device": "CPU",
            "started": 1_000.0,
            "ended": 1_012.3,
            "dir": tmp_path,
        }
        if state == "failed":
            failure = Failure(
                2, 12, 1, None, "ValueError", "no data\nat all", 7, 3, "Traceback …", 1_005.0
            )
            values["failures"] = (failure,)
        return RunResult(**(values | changes))

    return make
