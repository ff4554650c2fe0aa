"""The trace of `--profile`: the ranks' marks, and the times of devices in the trace.

Marks are times of a rank's Python thread, which waits for input, for the compiler or, in a
rehearsal, for other ranks; otherwise it runs the cell (which includes waiting for the device when
a value is read). A trace from a TPU has a plane for each device, with the programs that ran on it
and their operations; one of torch's profiler has the kernels that ran on a GPU, and copies to and
from it; a trace of a rehearsal has none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tpunb.runs.directory import RunDir
from tpunb.runs.spec import Profile
from tpunb.runs.step_times import DeviceTime, StepTimes
from tpunb.utils import files, records

MOST = 100_000_000
"""The most bytes of traces that are read, in some seconds; further ranks' are left out."""
SUFFIX = ".xplane.pb"
"""The suffix of files with a trace of torch_xla's profiler, which xprof opens."""
TORCH_SUFFIX = ".pt.trace.json"
"""That of torch's own profiler, which Perfetto opens (https://ui.perfetto.dev)."""
_DEVICE = "/device:"
_PROGRAMS, _OPERATIONS = "XLA Modules", "XLA Ops"
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
"""Prefixes of the names of XLA's operations: 'all-reduce-start.3'."""
_OF_GPU, _NCCL = frozenset({"kernel", "gpu_memcpy", "gpu_memset"}), "nccl"
"""Categories of events that ran on a GPU, and the prefix of nccl's kernels: 'ncclDevKernel_…'."""


@dataclass(frozen=True)
class Marks:
    """The notes of one rank: the seconds of each step, and of the waits in it by cause."""

    first: int
    last: int
    seconds: tuple[float, ...] = ()
    input: tuple[float, ...] = ()
    compiling: tuple[float, ...] = ()
    collectives: tuple[float, ...] = ()
    """Waits in a rehearsal; a TPU's collectives are part of the device's time."""


def session_of(run: RunDir, profile: Profile) -> Path:
    """Return the folder of a session, where xprof expects a file per host; it has one per rank."""
    return run.profile / "plugins" / "profile" / f"steps-{profile.first}-{profile.last}"


def write_marks(path: Path, marks: Marks) -> None:
    """Write the marks of a rank. Raises OSError."""
    files.write_json(path, marks)


def read_step_times(
    run: RunDir, profile: Profile, world_size: int, attempts: int
) -> StepTimes | None:
    """Return the mean step of a run's trace; None if no rank has reached its steps."""
    for attempt in reversed(range(attempts)):
        found = {
            rank: marks
            for rank in range(world_size)
            if profile.has(rank) and (marks := _read_marks(run.step_times(attempt, rank)))
        }
        if found:
            break
    else:
        return None
    steps = sum(len(marks.seconds) for marks in found.values())

    def mean(column: Callable[[Marks], tuple[float, ...]]) -> float:
        return sum(sum(column(marks)) for marks in found.values()) / steps

    session = session_of(run, profile)
    devices, room = [], MOST
    for rank in found:
        for suffix, devices_in in ((SUFFIX, _tpus), (TORCH_SUFFIX, _gpus)):
            if data := _read(session / f"rank-{rank}{suffix}", room):
                devices += devices_in(data)
                room -= len(data)
    device = None
    if devices:
        each = len(devices) * max(len(marks.seconds) for marks in found.values())
        device = DeviceTime(
            sum(d.busy for d in devices) / each, sum(d.collectives for d in devices) / each
        )
    first = min(marks.first for marks in found.values())
    last = max(marks.last for marks in found.values())
    return StepTimes(
        first,
        last,
        tuple(found),
        seconds=mean(lambda marks: marks.seconds),
        input=mean(lambda marks: marks.input),
        compiling=mean(lambda marks: marks.compiling),
        collectives=mean(lambda marks: marks.collectives),
        device=device,
    )


def _read_marks(path: Path) -> Marks | None:
    try:
        marks: Marks = records.build(Marks, records.read(path))
    except (OSError, ValueError):
        return None
    columns = {len(marks.input), len(marks.compiling), len(marks.collectives)}
    return marks if marks.seconds and columns == {len(marks.seconds)} else None


def _read(trace: Path, most: int) -> bytes:
    """Return a rank's trace; b"" if the file is missing or larger than `most` bytes."""
    try:
        return b"" if trace.stat().st_size > most else trace.read_bytes()
    except OSError:
        return b""


def _tpus(data: bytes) -> list[DeviceTime]:
    """Return the times of each device in a trace of torch_xla's; [] if it is cut off."""
    from google.protobuf.message import DecodeError

    space = xspace()
    try:
        space.ParseFromString(data)
    except DecodeError:
        return []
    return [_device_time(plane) for plane in space.planes if plane.name.startswith(_DEVICE)]


def _gpus(data: bytes) -> list[DeviceTime]:
    """Return the times of each GPU in a trace of torch's profiler; [] if it is cut off."""
    if b'"kernel"' not in data:  # a trace of the CPU alone, which would take seconds to parse
        return []
    try:
        events = json.loads(data)["traceEvents"]
    except ValueError:
        return []
    ran: dict[int, list[tuple[int, int]]] = defaultdict(list)
    exchanged: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _OF_GPU:
            began = int(event["ts"] * 1e6)  # from microseconds
            span = (began, began + int(event["dur"] * 1e6))
            ran[event["pid"]].append(span)
            if event["name"].startswith(_NCCL):
                exchanged[event["pid"]].append(span)
    return [DeviceTime(_covered(spans), _covered(exchanged[gpu])) for gpu, spans in ran.items()]


def _device_time(plane: Any) -> DeviceTime:
    names = {entry.key: entry.value.name for entry in plane.event_metadata}
    programs, exchanged = [], []
    for line in plane.lines:
        if line.name == _PROGRAMS:
            programs += _spans(line.events)
        elif line.name == _OPERATIONS:
            exchanged += _spans(
                event
                for event in line.events
                if names.get(event.metadata_id, "").lstrip("%").startswith(_COLLECTIVES)
            )
    return DeviceTime(_covered(programs), _covered(exchanged))


def _spans(events: Iterable[Any]) -> list[tuple[int, int]]:
    return [(event.offset_ps, event.offset_ps + event.duration_ps) for event in events]


def _covered(spans: Sequence[tuple[int, int]]) -> float:
    """Return the seconds that are covered by at least one of the spans."""
    total, end = 0, -1
    for begin, until in sorted(spans):
        total += max(0, until - max(begin, end))
        end = max(end, until)
    return total / 1e12


@lru_cache(maxsize=1)
def _xspace_class() -> Any:
    """Make the message XSpace with the fields that are read, of tsl's xplane.proto."""
    from google.protobuf import descriptor_pb2, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    number, text = field.TYPE_INT64, field.TYPE_STRING
    file = descriptor_pb2.FileDescriptorProto(
        name="tpunb/xplane.proto", package="tpunb", syntax="proto3"
    )
    messages: dict[str, list[tuple[str, int, Any, bool]]] = {
        "XEvent": [
            ("metadata_id", 1, number, False),
            ("offset_ps", 2, number, False),
            ("duration_ps", 3, number, False),
        ],
        "XLine": [("name", 2, text, False), ("events", 4, "XEvent", True)],
        "XEventMetadata": [("id", 1, number, False), ("name", 2, text, False)],
        # A map is encoded as a list of such entries.
        "Entry": [("key", 1, number, False), ("value", 2, "XEventMetadata", False)],
        "XPlane": [
            ("name", 2, text, False),
            ("lines", 3, "XLine", True),
            ("event_metadata", 4, "Entry", True),
        ],
        "XSpace": [("planes", 1, "XPlane", True)],
    }
    for message, fields in messages.items():
        made = file.message_type.add(name=message)
        for name, tag, kind, repeated in fields:
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            one = made.field.add(name=name, number=tag, label=label)
            if isinstance(kind, str):
                one.type, one.type_name = field.TYPE_MESSAGE, f".tpunb.{kind}"
            else:
                one.type = kind
    return message_factory.GetMessages([file])["tpunb.XSpace"]


def xspace() -> Any:
    """Return an empty trace."""
    return _xspace_class()()
