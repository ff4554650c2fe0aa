"""What a host sends, and in which order; its processes are simulated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tpunb.runs import directory, folder_stream
from tpunb.runs.protocol import (
    FileGrown,
    Message,
    MessageReader,
    NodeHere,
    Outbox,
    ShutDown,
    StacksCollected,
    StartNode,
)
from tpunb.runs.spec import RunSpec
from tpunb.worker.supervisor import arm
from tpunb.worker.supervisor.arm import Arm


class OneHost:
    def __init__(self, folder: Path) -> None:
        self.dir = directory.create_run(folder, "n")
        self.dir.write_spec(RunSpec(self.dir.id, "n", 2, "CPU", "/", (), (), hosts=("h0", "h1")))
        self.dir.attempt(0, 1).mkdir(parents=True)
        self.time = 0.0
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._reader = MessageReader(self._reading)
        self.outbox = Outbox(self._writing)
        self.node: Any = Mock(over=False, states=list)
        order = StartNode(str(self.dir.path), {}, 1, "", 0)
        self.arm = Arm(self.dir, order, self.node, self.outbox, lambda: self.time)

    def sent(self) -> list[Message]:
        """What has arrived; only files and what is not sent all the time."""
        found: list[Message] = []
        while messages := self._reader.read():
            found += messages
            self.outbox.flush()
        return [each for each in found if isinstance(each, FileGrown | StacksCollected | NodeHere)]

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneHost]:
    monkeypatch.setattr(folder_stream, "POLL_INTERVAL", 0.0)
    host = OneHost(tmp_path)
    yield host
    host.close()


def test_stacks_come_before_the_message_that_they_are_there(host: OneHost) -> None:
    host.dir.stacks(0, 1).write_text("Thread 1")
    host.node.report(StacksCollected())
    host.arm.step()
    assert [type(each) for each in host.sent()] == [NodeHere, FileGrown, StacksCollected]


def test_a_stop_does_not_wait_for_all_output(
    host: OneHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm, "MOST_WAITING", 1000)
    monkeypatch.setattr(folder_stream, "PIECE", 10_000)
    host.dir.stacks(0, 1).write_text("x" * 2_000_000)
    host.arm.step()
    host.arm.on_order(ShutDown(0.0))
    host.node.over = True
    for _ in range(2):
        host.arm.step()
        host.sent()
    host.time = arm.LAST_FILES + 1.0
    host.arm.step()
    assert host.dir.events.name in [
        each.file for each in host.sent() if isinstance(each, FileGrown)
    ]
    assert host.arm.step()
