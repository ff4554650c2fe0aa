"""The times of a mean step, from the ranks' marks and from traces as a TPU writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tpunb.runs import trace
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Profile
from tpunb.runs.step_times import DeviceTime
from tpunb.runs.trace import Marks

MS = 10**9
"""Picoseconds, the unit of times in traces."""


def plane_of_tpu(space: Any, number: int) -> None:
    """Two programs of 3 ms each, in which an all-reduce of 1 ms overlaps a fusion."""
    plane = space.planes.add(name=f"/device:TPU:{number}")
    for key, name in enumerate(("jit_step", "%all-reduce-start.1", "%fusion.2")):
        entry = plane.event_metadata.add(key=key)
        entry.value.name = name
    programs = plane.lines.add(name="XLA Modules")
    operations = plane.lines.add(name="XLA Ops")
    for began in (0, 10 * MS):
        programs.events.add(metadata_id=0, offset_ps=began, duration_ps=3 * MS)
        operations.events.add(metadata_id=1, offset_ps=began + MS, duration_ps=MS)
        operations.events.add(metadata_id=2, offset_ps=began, duration_ps=2 * MS)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    for rank in (0, 1):
        run.attempt(0, rank).mkdir(parents=True)
        marks = Marks(5, 6, (0.01, 0.01), (0.006, 0.004), (0.0, 0.002), (0.0, 0.0))
        trace.write_marks(run.step_times(0, rank), marks)
    return run


def test_profile_step_times_of_a_tpu_by_rank_and_device(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = Profile((), 5, 6)
    folder = trace.session_of(run, profile)
    folder.mkdir(parents=True)
    for rank in (0, 1):
        space = trace.xspace()
        space.planes.add(name="/host:CPU")
        plane_of_tpu(space, rank)
        (folder / f"rank-{rank}.xplane.pb").write_bytes(space.SerializeToString())
    steps = trace.read_step_times(run, profile, 2, 1)
    assert steps is not None
    assert steps.device == DeviceTime(pytest.approx(0.003), pytest.approx(0.001))
    assert str(steps) == (
        "steps 5 to 6: 10.0 ms each: waiting for input 5.0, compiling 1.0, Python 4.0; "
        "device 2.0, collectives 1.0, idle 7.0"
    )
    # Of many large traces some are read: the mean device is theirs.
    monkeypatch.setattr(trace, "MOST", (folder / "rank-0.xplane.pb").stat().st_size)
    read: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    assert trace.read_step_times(run, profile, 2, 1) == steps
    assert [path.name for path in read if path.suffix == ".pb"] == ["rank-0.xplane.pb"]


def test_profile_step_times_of_a_gpu(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)  # only torch_xla's need it
    profile = Profile((1,), 5, 6)
    folder = trace.session_of(run, profile)
    folder.mkdir(parents=True)
    events = [
        {"cat": kind, "name": name, "pid": 0, "ts": began, "dur": took}
        for kind, name, began, took in (
            ("kernel", "void cutlass::Kernel2<…>", 0.5, 4000.25),
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)", 3000.5, 2000.0),
            ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 9000.0, 1000.0),
            ("gpu_user_annotation", "ProfilerStep#5", 0.0, 20000.0),
        )
    ]
    text = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name", "pid": 0}, *events]})
    (folder / "rank-1.pt.trace.json").write_text(text)
    steps = trace.read_step_times(run, profile, 2, 1)
    assert steps is not None
    assert str(steps).endswith("; device 2.0, collectives 1.0, idle 7.0")


def test_profile_step_times_without_devices_or_of_a_damaged_trace(run: RunDir) -> None:
    profile = Profile((1,), 5, 6)
    folder = trace.session_of(run, profile)
    folder.mkdir(parents=True)
    (folder / "rank-1.xplane.pb").write_bytes(b"\xff\x00 cut off")
    (folder / "rank-1.pt.trace.json").write_bytes(b'{"traceEvents": [{"ph"')
    run.step_times(0, 0).write_text("{")
    steps = trace.read_step_times(run, profile, 2, 1)
    assert steps is not None
    assert (steps.ranks, steps.device, steps.device_parts()) == ((1,), None, [])
    assert trace.read_step_times(run, Profile((0,), 5, 6), 2, 1) is None
