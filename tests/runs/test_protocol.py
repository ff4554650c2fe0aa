from __future__ import annotations

import logging
import os
from typing import get_args

import pytest

from tpunb.runs import protocol
from tpunb.runs.protocol import (
    AbandonAttempt,
    AllFinished,
    AllHere,
    AttemptFailed,
    AttemptFinished,
    AttemptReady,
    Beat,
    Broken,
    CellStarted,
    ForkRunner,
    HostEnded,
    HostHere,
    HostLost,
    ImportLibraries,
    JoinHosts,
    Leaving,
    LibrariesImported,
    Message,
    MessageReader,
    MessageWriter,
    Preload,
    PreludeKept,
    PreludeNotForkable,
    PreludeNotKept,
    RankExited,
    RanksForked,
    Ready,
    RefuseRun,
    RunFinished,
    RunnerExits,
    RunnerForked,
    RunOver,
    StartAttempt,
    StartRun,
    StopRanks,
    StopRun,
)
from tpunb.runs.spec import Stop, StopCause, StopOrigin

MESSAGES = [
    Preload({"HOME": "/home/ä"}, ["/a", "/b"], [0, 3]),
    StartRun("/runs/1", {"A": "b\n"}, "tpu", detached=True),
    StartRun("/runs/1", {}),
    StartRun("/tmp/1", {}, ahead=True),
    StopRun("/runs/1", Stop(StopCause.USER, "enough", StopOrigin.NOTEBOOK, now=True)),
    StopRun("/runs/1", Stop(StopCause.KERNEL_GONE, "the kernel has ended")),
    Ready(),
    RunFinished("/runs/1"),
    Broken(-9, "last words"),
    Leaving("the supervisor was terminated (SIGTERM)"),
    ImportLibraries(["/a"], "/tmp/x"),
    ForkRunner("/runs/1", {"A": "b"}, None),
    ForkRunner("/runs/1", {"A": "b"}, "cell [2] runs a backward pass", 3),
    LibrariesImported({"GRPC_VERBOSITY": ["ERROR"], "XLA_FLAGS": ["--a", "--a --b"]}),
    RunnerForked(12),
    RunnerExits(1),
    CellStarted(None),
    CellStarted(3),
    PreludeKept(14, 0, 2, 0.5, {"/a/mine.py": [1, 2]}, ["/tmp/x"]),
    PreludeNotKept("cell [2] has started a process"),
    PreludeNotForkable("cell [2] uses an XLA device"),
    RanksForked(1, [12, 13]),
    RankExited(1, -9, 17.5, 1 << 33, finished=False),
    StopRanks(),
    JoinHosts("/runs/1", 1, "10.0.0.3", "10.0.0.2", 29477, "ab", {"torch": "2.9.0"}, 2.0, 20.0),
    ForkRunner("/runs/1", {"A": "b"}, None, node_rank=1, address="10.0.0.3", port=29477),
    HostHere({"torch": "2.9.0"}),
    AllHere(),
    AttemptReady(1, 40123),
    StartAttempt(1, "10.0.0.2", 40123),
    AttemptFinished(1),
    AttemptFailed(1, "rank h1/3 has failed"),
    AbandonAttempt(1, "rank h1/3 has failed"),
    AllFinished(),
    RefuseRun("torch: 2.9.0 on h0, but 2.8.0 on h1"),
    Stop(StopCause.USER, "enough", StopOrigin.NOTEBOOK, now=True),
    HostLost(2, "host h2 was lost", 17.5),
    HostEnded({"state": "succeeded"}, 18.5),
    HostEnded({"state": "succeeded"}, 18.5, [{"optimizer": "SGD"}]),
    RunOver({"state": "succeeded"}),
    Beat(idle=True),
]


def test_messages_survive_encoding() -> None:
    assert {type(message) for message in MESSAGES} == set(get_args(Message))
    for message in MESSAGES:
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
