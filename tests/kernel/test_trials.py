"""The processes of a sweep's trials."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpunb.kernel import papermill, trials


@pytest.mark.usefixtures("starts_processes")
def test_papermill_error_fails_the_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error such as a full disk, with a message of any length."""

    def execute(*arguments: Any, **options: Any) -> None:
        raise OSError("no space left" + 1_000_000 * " on device")

    monkeypatch.setattr(papermill, "execute", execute)
    names = "notebook ran output cores on trials".split()
    order = {**dict.fromkeys(names, "x"), "parameters": {}}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), 2)
        lent: Any = SimpleNamespace(folder=tmp_path)
        trials._become_papermill(order, theirs, parent, lent)
    theirs.close()
    with ours:
        said = json.loads(ours.recv(1 << 20) or "{}")
    os.waitpid(pid, 0)
    assert said.get("failed")
    assert said["error"].startswith("OSError: no space left on device")
