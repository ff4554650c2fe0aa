from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tests.fakes.dumps import DUMPS
from tests.fakes.machine import FakeMachine
from tests.fakes.metadata import Behaviour, FakeMetadataServer
from tests.machine.machines import LONG
from tpunb.machine import metadata


def test_all_is_asked_at_once_and_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    values = DUMPS["v5e-16"].metadata
    with FakeMetadataServer(values) as server:
        told = metadata.read_all({"GCE_METADATA_HOST": server.host}, tmp_path, 10)
    assert told.answers
    assert sorted(server.asked) == sorted(metadata.KEYS)
    assert "cluster-name" not in told.values
    assert told.values["agent-worker-number"] == "1"
    assert told.tpu_env["ACCELERATOR_TYPE"] == "v5litepod-16"
    assert told.tpu_env["TPU_PROCESS_BOUNDS"] == "2,2,1"


@pytest.mark.parametrize("behaviour", ["stalls", "refuses", "not Google's"])
def test_an_unwell_server(behaviour: Behaviour, tmp_path: Path) -> None:
    with FakeMetadataServer({"tpu-env": "A: 'b'"}, behaviour) as server:
        patience = 0.3 if behaviour == "stalls" else LONG
        told = metadata.read_all({"GCE_METADATA_HOST": server.host}, tmp_path, patience)
    assert (told.answers, told.tpu_env) == (False, {})


@pytest.mark.usefixtures("starts_processes")
def test_a_look_up_of_the_name_that_takes_for_ever_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def waits(*args: object) -> None:
        over.wait()
        raise OSError

    monkeypatch.setattr(socket, "create_connection", waits)
    machine = FakeMachine(tmp_path).chips("v5e", 1)
    assert not metadata.read_all(machine.env, tmp_path, 0.01).answers
    over.set()
    for thread in threading.enumerate():
        if thread.name == "tpunb-call":
            thread.join()


def test_a_machine_that_has_nothing_of_googles_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it asks"))
    assert not metadata.read_all({}, tmp_path).answers
