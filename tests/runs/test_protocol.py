from __future__ import annotations

import logging
import os
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from tpunb.runs import protocol
from tpunb.runs.protocol import Message, MessageReader, MessageWriter, Ready, RunnerForked
from tpunb.runs.spec import StopCause, StopOrigin

SAMPLES: dict[Any, Any] = {
    str: "ä\n",
    int: 1 << 33,
    float: 17.5,
    bool: True,
    Any: 1 << 62,
    StopCause: StopCause.KERNEL_GONE,
    StopOrigin: StopOrigin.MAGIC,
}


def sample(hint: Any, *, optional: bool) -> Any:
    """A value of a type, with one in each field; in those that may be None, if `optional`."""
    inner = get_args(hint)
    if isinstance(hint, UnionType):
        return sample(inner[0], optional=optional) if optional else None
    if get_origin(hint) is dict:
        return {"A": sample(inner[1], optional=optional)}
    if (made := get_origin(hint)) in (list, tuple):
        return made([sample(inner[0], optional=optional)])
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint).items()
        return hint(**{name: sample(each, optional=optional) for name, each in hints})
    return SAMPLES[hint]


@pytest.mark.parametrize("kind", get_args(Message))
def test_messages_survive_encoding(kind: type[Message]) -> None:
    for optional in (True, False):
        message = sample(kind, optional=optional)
        line = protocol.encode_message(message)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        assert protocol.decode_message(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"kind": "RunnerForked"}',
        b'{"kind": "RunnerForked", "pid": "12"}',
        b'{"kind": "RunnerForked", "pid": 12, "more": 1}',
        b'{"kind": "RanksForked", "attempt": 0, "pids": [1, {}]}',
        b'{"kind": "RanksForked", "attempt": 100000000000000000000, "pids": [1]}',
        b'{"kind": "NodeHere", "facts": {"torch": [2]}, "time": 1.0}',
        b'{"kind": "NodeHere", "facts": {}, "time": Infinity}',
        b'{"kind": "StopRun", "dir": "/", "stop": {"cause": "boredom"}}',
        b'{"kind": "\xff"}',
    ],
)
def test_invalid_message_line_is_logged(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tpunb"):
        assert protocol.decode_message(line) is None
    assert len(caplog.records) == 1


def test_message_reader_joins_pieces_and_detects_the_end() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    reader, writer = MessageReader(read_end), MessageWriter(write_end)
    assert (reader.read(), reader.closed) == ([], False)
    os.write(write_end, b'nonsense\n{"kind": "Run')
    assert reader.read() == []
    os.write(write_end, b'nerForked", "pid": 1}\n')
    writer.send(Ready())
    assert reader.read() == [RunnerForked(1), Ready()]
    writer.close()
    assert (reader.read(), reader.closed) == ([], True)
    os.close(read_end)
