from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tpunb.runs.directory import RunDir
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


def test_spec_survives_json_with_its_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_spec(SPEC)
    data = json.loads(run.spec.read_text())
    assert data["version"] == 1
    assert RunSpec.from_json(data) == SPEC
    for later in ("version", "profile", "price"):  # of older runs
        del data[later]
    assert RunSpec.from_json(data) == replace(SPEC, profile=None, price=None)


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
