"""A host's files as messages, and their way into the folder of the whole run."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tpunb.runs import folder_stream
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Figure, Note, Phase, to_line
from tpunb.runs.folder_stream import FolderStream, UnionFolder, fetched_path
from tpunb.runs.protocol import FileGrown, FileReplaced
from tpunb.runs.spec import PhaseKind


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
        found[line.file] = found.get(line.file, b"") + base64.b64decode(line.data)
    return found


def test_what_was_appended_comes_once_and_in_pieces(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_stream, "PIECE", 4)
    stream = FolderStream(run)
    path = run.attempt(0, 2) / "stdout.log"
    path.write_bytes(b"one\ntwo\n")
    pieces = [base64.b64decode(piece.data) for piece in stream.read()]
    assert pieces == [b"one\n", b"two\n"]
    assert said(stream) == {}
    with path.open("ab") as file:
        file.write(b"3")
    assert said(stream) == {"attempts/0/2/stdout.log": b"3"}
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


def test_small_files_are_sent_whole_when_they_change(run: RunDir) -> None:
    stream = FolderStream(run)
    pulse, progress = run.heartbeat(0, 2), run.progress(0, 2)
    pulse.write_bytes(b"\x00" * 80)
    progress.write_text("{}")
    assert said(stream) == {"attempts/0/2/pulse": b"\x00" * 80, "attempts/0/2/progress.json": b"{}"}
    assert said(stream) == {}
    pulse.write_bytes(b"\x01" * 80)
    assert said(stream) == {"attempts/0/2/pulse": b"\x01" * 80}


def test_a_file_that_grows_all_the_time_leaves_room_for_others(run: RunDir) -> None:
    run.stacks(0, 2).write_text("much " * folder_stream.PIECE * 3)
    (run.attempt(0, 2) / "stdout.log").write_text("little")
    stream, sent = FolderStream(run), []
    for _ in range(2):  # who reads has no more room
        sent.append(next(stream.read()).file)
    assert sorted(sent) == ["attempts/0/2/stacks.txt", "attempts/0/2/stdout.log"]
    stream.close()


def test_a_deleted_folder_is_not_made_again(run: RunDir, tmp_path: Path) -> None:
    gone = RunDir(tmp_path / "gone")
    folder = union(gone, 1)
    folder.add(FileGrown("attempts/0/2/stdout.log", data("x")))
    assert folder.problem.startswith("No such file or directory")
    assert not gone.path.exists()


def test_secrets_inputs_and_checkpoints_are_not_streamed(run: RunDir) -> None:
    for name in ("spec.json", "script.py", "env.json", "requests.jsonl", "result.json"):
        (run.path / name).write_text(json.dumps({"secret": "x"}))
    run.checkpoints.mkdir()
    (run.checkpoints / "000001-step-1.json").write_text("{}")
    (run.path / ".result.json.room").write_text("")
    assert said(FolderStream(run), last=True) == {}


def union(run: RunDir, node_rank: int) -> UnionFolder:
    return UnionFolder(run, node_rank, range(2 * node_rank, 2 * node_rank + 2), f"h{node_rank}")


def data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def files(run: RunDir) -> set[str]:
    return {str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("file", "host", "where"),
    [
        ("attempts/0/2/stdout.log", 1, "attempts/0/2/stdout.log"),
        ("attempts/0/1/stdout.log", 1, "hosts/1/attempts/0/1/stdout.log"),
        ("attempts/0/prelude/error.json", 0, "attempts/0/prelude/error.json"),
        ("attempts/0/prelude/error.json", 1, "hosts/1/attempts/0/prelude/error.json"),
        ("supervisor.log", 0, "hosts/0/supervisor.log"),
        ("chips.json", 0, "chips.json"),
        ("metrics.jsonl", 1, "metrics.jsonl"),
    ],
)
def test_where_a_hosts_file_is_in_the_folder_of_the_run(
    run: RunDir, file: str, host: int, where: str
) -> None:
    kind = FileGrown if file.endswith(("log", "jsonl")) else FileReplaced
    union(run, host).add(kind(file, data("{}\n")))
    assert files(run) == {where}


@pytest.mark.parametrize(
    "file",
    [
        *("spec.json", "result.json", "run.log", "running.lock", "../out.log", "/tmp/out.log"),
        *("attempts/../../out.log", "attempts/0/2/.hidden.json", "attempts//2/x.log", ""),
        *("attempts/0/2/x.py", "attempts", "attempts/0/2/a\nb.log", "checkpoints/1.json"),
        *("attempts/0/2/crash.txt/x.log", "attempts/" + "a/" * 1900 + "x.log"),
    ],
)
def test_files_that_no_host_may_write(run: RunDir, file: str) -> None:
    folder = union(run, 1)
    for change in (FileGrown(file, data("x")), FileReplaced(file, data("x"))):
        assert folder.add(change) == []
    assert folder.add(FileGrown("attempts/0/2/x.log", "no base64")) == []
    assert files(run) == set()
    assert not (run.path.parent / "out.log").exists()


def test_events_of_a_host_are_returned(run: RunDir) -> None:
    kept = [Phase(PhaseKind.TRAINING, "training", time=5.0), Note("slow", 6.0), Figure(0, 1, 7.0)]
    lines = "".join(map(to_line, kept))
    sent = [FileGrown("events.jsonl", data(part)) for part in (lines[:20], lines[20:] + "cut")]
    first, second = union(run, 0), union(run, 1)
    second.ahead = 2.0
    assert [event for each in sent for event in first.add(each)] == kept
    assert [event for each in sent for event in second.add(each)] == [
        Note("h1: slow", 4.0),
        Figure(0, 1, 5.0),
    ]


def test_times_are_those_of_this_machine(run: RunDir) -> None:
    folder = union(run, 1)
    folder.ahead = 100.0
    folder.add(FileGrown("metrics.jsonl", data('{"step": 1, "time": 101.0}\n{"st')))
    folder.add(FileGrown("metrics.jsonl", data('ep": 2, "time": 102.0}\nwhat?\n')))
    folder.add(FileReplaced("attempts/0/2/error.json", data('{"type": "E", "time": 103.0}')))
    rows = run.metrics.read_text().splitlines()
    assert [json.loads(row) for row in rows[:2]] == [
        {"step": 1, "time": 1.0},
        {"step": 2, "time": 2.0},
    ]
    assert rows[2:] == ["what?"]
    assert json.loads(run.error(0, 2).read_text()) == {"type": "E", "time": 3.0}


def test_a_file_that_cannot_be_written_is_named(run: RunDir) -> None:
    folder = union(run, 1)
    (run.path / "hosts").write_text("in the way")
    folder.add(FileGrown("supervisor.log", data("x")))
    assert folder.problem == "Not a directory (supervisor.log)"


def test_fetched_files_do_not_replace_those_of_the_run() -> None:
    assert fetched_path("returns/report.json", 0, range(2)) == "returns/report.json"
    assert fetched_path("checkpoints/1.pt", 1, range(2, 4)) == "hosts/1/checkpoints/1.pt"
    for own in ("result.json", "spec.json", "run.log", "attempts/0/0/stdout.log"):
        assert fetched_path(own, 0, range(2)) is None
