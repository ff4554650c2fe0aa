from __future__ import annotations

import logging
import os
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from tpunb.runs import protocol
from tpunb.runs.protocol import Message, MessageReader, MessageWriter, Ready, RunnerForked
from tpunb.runs.spec import Stop, StopCause, StopOrigin

SAMPLES: dict[type, Any] = {
    str: "ä\n",
    int: 1 << 33,
    float: 17.5,
    bool: True,
    dict: {"A": ["--a", "b\n"]},
    list: ["/a"],
    Stop: Stop(StopCause.USER, "enough", StopOrigin.NOTEBOOK, now=True),
    StopCause: StopCause.KERNEL_GONE,
    StopOrigin: StopOrigin.MAGIC,
}


def sample(kind: type, *, optional: bool) -> Any:
    """A message with a value in each field; in those that may be None, if `optional`."""
    values = {}
    for name, hint in get_type_hints(kind).items():
        first, *others = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        values[name] = _value(first, optional=optional) if optional or not others else None
    return kind(**values)


def _value(hint: Any, *, optional: bool) -> Any:
    if get_origin(hint) is tuple:
        return (_value(get_args(hint)[0], optional=optional),)
    if get_args(hint) == (str, str):
        return {"A": "b\n"}
    if hint not in SAMPLES and is_dataclass(hint):
        return sample(hint, optional=optional)
    return SAMPLES[get_origin(hint) or hint]


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
