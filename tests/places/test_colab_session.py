"""The code that is sent to a Colab session, run locally as its kernel would run it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from tpunb.places import colab_session as session
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec, RunState, StopCause
from tpunb.runs.stream import Append, End, Hello, Line, Stop, StreamReader, encode

SPEC = RunSpec("nb", "colab", 1, "CPU", ".", (), (), hosts=("colab",), place="colab")


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended_run(content: Path, log: str) -> RunDir:
    """Make an ended run in the session's folder `name`."""
    from tpunb.runs.result import RunResult

    folder = content / "name" / "run"
    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.write_spec(SPEC)
    run.log.write_text(log)
    run.write_result(RunResult(RunState.SUCCEEDED, "nb", 1, "CPU", 1.0, 2.0, folder))
    return run


def said(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [
        json.loads(line.removeprefix(session.MARK))
        for line in lines
        if line.startswith(session.MARK)
    ]


def stream_of(told: list[dict[str, Any]]) -> list[Line | str]:
    reader = StreamReader(1 << 20)
    return [
        line
        for each in told
        if "data" in each
        for line in reader.feed(zlib.decompress(b64decode(each["data"])))
    ]


@pytest.mark.usefixtures("starts_processes")
def test_follow_an_ended_run_from_known_offsets(
    content: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ended_run(content, "[0] one\n[0] two\n")
    (run.checkpoints).mkdir()
    (run.checkpoints / "step-1").touch()
    session.follow("name", {"run.log": 8}, "me", 60.0)
    told = said(capsys.readouterr().out)
    assert [each["number"] for each in told[:-1]] == list(range(len(told) - 1))
    assert told[-1] == {"over": True, "large": ["checkpoints"]}
    lines = stream_of(told)
    (log,) = (line for line in lines if isinstance(line, Append) and line.file == "run.log")
    assert (log.at, log.data) == (8, b"[0] two\n")
    assert lines[-1] == End(0)


def test_follow_a_run_that_never_began(content: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session.follow("name", {}, "me", 60.0)
    assert said(capsys.readouterr().out) == [
        {"over": True, "error": "the run was never started in this session"}
    ]


@pytest.mark.parametrize("returncode", [0, 1])
def test_library_output_is_not_taken_for_node_messages(
    content: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    returncode: int,
) -> None:
    with tarfile.open(content / "name.tar", "w") as archive:
        for name, data in (("run/spec.json", json.dumps(SPEC.to_json())), ("start.json", "{}")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data.encode()))
    hello = (
        encode(Hello("id", 0, 1, "colab", "127.0.0.1", "flags", "127.0.0.1:1"))
        if returncode == 0
        else b""
    )
    output = b"from a library\n" + hello + b"from a library\n"
    done = subprocess.CompletedProcess([], returncode, output, b"the reason")
    monkeypatch.setattr(session.subprocess, "run", lambda *words, **options: done)
    monkeypatch.setattr(session, "install", lambda packages: "")
    monkeypatch.setattr(session, "follow", lambda *words: None)
    monkeypatch.setattr(session, "versions", lambda: {"python": "3"})
    session.begin("name", [], "tpunb.whl", "me", 60.0)
    (told,) = said(capsys.readouterr().out)
    if returncode:
        assert told["error"] == "the reason"
    else:
        assert told["hello"] == hello.decode().strip()


class Node:
    """A stand-in for the process of `tpunb node`, with its pipes."""

    def __init__(self) -> None:
        self.heard, heard = os.pipe()
        said, self.says = os.pipe()
        self.stdin = open(heard, "wb")  # noqa: SIM115 (like a process)
        self.stdout = open(said, "rb")  # noqa: SIM115

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
        os.close(self.heard)
        os.close(self.says)


def test_stop_requests_come_as_files_and_a_new_follower_replaces_the_old(
    content: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = content / "name"
    folder.mkdir()
    node = Node()
    try:
        stop = encode(Stop(StopCause.USER, "enough"))
        (folder / "stop-1-1.json").write_bytes(stop)
        (folder / "stop-1-2.json").write_bytes(stop[:20])  # still being uploaded
        session.take_requests(str(folder), node)
        assert os.read(node.heard, 1000) == stop
        assert sorted(os.listdir(folder)) == ["stop-1-2.json"]
        (folder / "follower.txt").write_text("another")
        os.write(node.says, b"a line\nhalf a")
        assert session.pass_on(str(folder), node, "me", 60.0) is False
        assert zlib.decompress(b64decode(said(capsys.readouterr().out)[0]["data"])) == b"a line\n"
    finally:
        node.close()


def test_follower_does_not_wait_for_packing_files(
    content: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, packed = threading.Event(), threading.Event()

    def pack(folder: str, name: str, patterns: list[str]) -> None:
        go.wait(60)
        packed.set()

    monkeypatch.setattr(session, "pack", pack)
    (content / "pack-1.json").write_text('{"name": "pack-1", "patterns": []}\n')
    session.take_requests(str(content), None)
    assert not packed.is_set()
    go.set()
    assert packed.wait(60)


@pytest.mark.usefixtures("starts_processes")
def test_files_are_packed_in_parts(
    content: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_run(content, "")
    run.checkpoints.mkdir()
    (run.checkpoints / "step-1").write_bytes(bytes(100_000))
    session.packed("name", "pack-1", ["checkpoints"])
    (small,) = said(capsys.readouterr().out)
    assert (small["parts"], small["error"]) == (1, "")
    monkeypatch.setattr(session, "PART", 40_000)
    session.packed("name", "pack-2", ["checkpoints"])
    (large,) = said(capsys.readouterr().out)
    assert (large["parts"], "data" in large) == (3, False)
    assert json.loads((content / "name/pack-2/parts.json").read_text())["parts"] == 3
    parts = [(content / f"name/pack-2/part-{number}").read_bytes() for number in range(3)]
    assert b"".join(parts) == b64decode(small["data"])
    with tarfile.open(fileobj=io.BytesIO(b"".join(parts).partition(b"\n")[2])) as archive:
        assert archive.getnames() == ["checkpoints/step-1"]


@pytest.mark.usefixtures("starts_processes")
def test_session_without_torch_is_reported_and_nothing_is_unpacked(content: Path) -> None:
    code = f"exec({Path(session.__file__).read_text()!r}, made := {{}})\n"
    code += "made['begin']('name', [], 'tpunb.whl', 'me', 1.0)"
    bare = [sys.executable, "-S", "-c", code]
    done = subprocess.run(bare, capture_output=True, text=True, cwd=content)
    (told,) = said(done.stdout)
    assert told["missing"] == ["torch", "torch_xla"], done.stderr
    assert os.listdir(content) == []
