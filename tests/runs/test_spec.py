from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tpunb.runs.spec import Block, Price, Profile, RunSpec, RunState, StopCause

SPEC = RunSpec(
    "id",
    "digits",
    2,
    "CPU",
    "/",
    ("a", "b"),
    (Block("header", 1, 1), Block("train", 2, 3, 0, 7)),
    returns=("x",),
    profile=Profile((0, 3), 5, 10),
    price=Price(9.6, "v5litepod-8 in us-west4, on demand", "2026-11-21", "a catalogue"),
)


def test_spec_survives_json_with_its_version() -> None:
    data = json.loads(json.dumps(SPEC.to_json()))
    assert data["version"] == 1
    assert RunSpec.from_json(data) == SPEC
    for later in ("version", "profile", "price"):  # of older runs
        del data[later]
    assert RunSpec.from_json(data) == replace(SPEC, profile=None, price=None)


def test_script_line_is_mapped_to_a_cell_line() -> None:
    assert SPEC.locate(3) == (7, 2)
    assert SPEC.locate(1) == (None, None)
    assert SPEC.describe_line(3) == "cell [7], line 2"
    assert SPEC.describe_line(1) == "line 1 of script.py"


@pytest.mark.parametrize(
    ("spec", "cores"),
    [
        (SPEC, "2 rehearsal cores"),
        (replace(SPEC, world_size=1, device="TPU"), "1 TPU core"),
        (replace(SPEC, world_size=1, device="TPU", spmd=8), "8 TPU cores"),
    ],
)
def test_cores(spec: RunSpec, cores: str) -> None:
    assert spec.cores() == cores


def test_enum_values_are_strings_in_text_and_json() -> None:
    assert f"{StopCause.USER}" == "interrupt"
    assert repr(RunState.FAILED) == "'failed'"
    assert json.dumps([RunState.HUNG]) == '["hung"]'
    assert [state for state in RunState if state.active] == [
        RunState.STARTING,
        RunState.WAITING,
        RunState.RUNNING,
        RunState.STOPPING,
        RunState.AWAY,
    ]
