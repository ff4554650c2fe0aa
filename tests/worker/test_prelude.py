"""The runner and the process that it forks to leave a copy; no cells are run."""

from __future__ import annotations

import os
import signal
from typing import cast

import pytest

from tpunb.runs.protocol import MessageWriter
from tpunb.utils import processes
from tpunb.worker import fork_safety
from tpunb.worker.prelude import Copy


@pytest.fixture
def copy() -> Copy:
    def begin(*_: object) -> None:
        raise AssertionError("no run begins")

    writer = cast(MessageWriter, None)
    return Copy(None, writer, os.getpid(), begin)  # type: ignore[arg-type]


@pytest.mark.usefixtures("starts_processes")
def test_prelude_copy_with_a_hanging_fork_handler_is_given_up(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_safety, "CHILD_WAIT", 0.2)
    copy._between = pid = os.fork()
    if pid == 0:  # the process that is to fork the copy, in a handler of a library
        while True:
            signal.pause()
    copy.await_successor()
    assert processes.find_process(pid) is None


@pytest.mark.usefixtures("starts_processes")
def test_prelude_copy_reaped_by_another_thread(copy: Copy) -> None:
    copy.await_successor()
    copy._between = os.fork()
    if copy._between == 0:
        os._exit(0)
    os.waitpid(copy._between, 0)  # as a thread of the cells does
    copy.await_successor()
    assert copy._between is None
