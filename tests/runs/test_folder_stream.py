from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpunb.runs import folder_stream
from tpunb.runs.directory import RunDir
from tpunb.runs.folder_stream import FolderStream
from tpunb.runs.stream import Append, Replace


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(folder_stream, "POLL_INTERVAL", 0.0)
    monkeypatch.setattr(folder_stream, "OFTEN", 0.0)
    run = RunDir(tmp_path)
    run.attempt(0, 2).mkdir(parents=True)
    return run


def said(stream: FolderStream, *, last: bool = False) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for line in stream.read(last=last):
        found[line.file] = found.get(line.file, b"") + line.data
    return found


def test_appended_log_data_comes_once_and_in_pieces(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_stream, "PIECE", 4)
    stream = FolderStream(run)
    path = run.attempt(0, 2) / "stdout.log"
    path.write_bytes(b"one\ntwo\n")
    first, second = (line for line in stream.read() if isinstance(line, Append))
    assert (first.file, first.at, first.data) == ("attempts/0/2/stdout.log", 0, b"one\n")
    assert (second.at, second.data) == (4, b"two\n")
    assert said(stream) == {}
    with path.open("ab") as file:
        file.write(b"3")
    assert said(stream) == {"attempts/0/2/stdout.log": b"3"}  # as it came, not as lines
    stream.close()


def test_failure_file_comes_before_the_output_of_the_rank(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_stream, "POLL_INTERVAL", 1000.0)
    stream = FolderStream(run)
    printed = run.attempt(0, 2) / "stderr.log"
    printed.write_text("a warning\n")
    assert said(stream) == {"attempts/0/2/stderr.log": b"a warning\n"}
    run.error(0, 2).write_text("{}")
    with printed.open("a") as file:
        file.write("Traceback")
    assert list(said(stream)) == ["attempts/0/2/error.json", "attempts/0/2/stderr.log"]
    assert said(stream) == {}
    stream.close()


def test_merged_log_files_are_sent_in_complete_lines(run: RunDir) -> None:
    stream = FolderStream(run)
    run.log.write_bytes(b"[0] a\n[0] b")
    (line,) = stream.read()
    assert isinstance(line, Append)
    assert (line.at, line.data) == (0, b"[0] a\n")
    with run.log.open("ab") as file:
        file.write(b"c\n[0] d")
    (line,) = stream.read()
    assert isinstance(line, Append)
    assert (line.at, line.data) == (6, b"[0] bc\n")
    (line,) = stream.read(last=True)
    assert isinstance(line, Append)
    assert (line.at, line.data) == (13, b"[0] d\n")
    stream.close()


def test_small_files_are_sent_whole_when_they_change(run: RunDir) -> None:
    stream = FolderStream(run)
    pulse, progress = run.heartbeat(0, 2), run.progress(0, 2)
    pulse.write_bytes(b"\x00" * 80)
    progress.write_text("{}")
    assert said(stream) == {
        "attempts/0/2/pulse": b"\x00" * 80,
        "attempts/0/2/progress.json": b"{}",
    }
    assert said(stream) == {}
    pulse.write_bytes(b"\x01" * 80)
    assert said(stream) == {"attempts/0/2/pulse": b"\x01" * 80}


def test_the_result_comes_last(run: RunDir) -> None:
    stream = FolderStream(run)
    run.result.write_text("{}")
    run.log.write_text("[0] a\n")
    run.error(0, 2).write_text("{}")
    lines = list(stream.read(last=True))
    assert isinstance(lines[-1], Replace)
    assert [line.file for line in lines] == ["run.log", "attempts/0/2/error.json", "result.json"]
    stream.close()


def test_folder_stream_starts_at_given_offsets(run: RunDir) -> None:
    run.log.write_text("[0] a\n[0] b\n")
    stream = FolderStream(run, {"run.log": 6})
    (line,) = stream.read()
    assert isinstance(line, Append)
    assert (line.at, line.data) == (6, b"[0] b\n")
    stream.close()


def test_secrets_inputs_and_checkpoints_are_not_streamed(run: RunDir) -> None:
    for name in ("spec.json", "script.py", "env.json", "requests.jsonl"):
        (run.path / name).write_text(json.dumps({"secret": "x"}))
    run.checkpoints.mkdir()
    (run.checkpoints / "000001-step-1.json").write_text("{}")
    (run.path / ".result.json.room").write_text("")
    assert said(FolderStream(run), last=True) == {}
