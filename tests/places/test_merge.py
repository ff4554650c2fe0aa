"""The union of the hosts' folders, from their messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpunb.places.merge import HOLD, Merge
from tpunb.runs import events
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Figure, Note, Phase, RankEnded, RanksStarted, Stopping
from tpunb.runs.spec import PhaseKind, RunSpec, RunState
from tpunb.runs.stream import Append, Replace

SPEC = RunSpec("id", "pod", 4, "CPU", "/", (), (), hosts=("h0", "h1"), place="pod")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def merge(run: RunDir) -> Merge:
    return Merge(run, SPEC, (0.0, 0.0))


def say(merge: Merge, host: int, *said: events.Event, at: int | None = None) -> None:
    data = "".join(map(events.to_line, said)).encode()
    known = merge.offsets[host].get("events.jsonl", 0) if at is None else at
    merge.add(host, Append("events.jsonl", known, data, 0.0), 0.0)


def test_merge_copies_files_of_ranks_and_separates_files_of_hosts(
    run: RunDir, merge: Merge
) -> None:
    merge.add(1, Append("attempts/0/2/stdout.log", 0, b"one\ntw", 0.0), 0.0)
    merge.add(1, Append("attempts/0/2/stdout.log", 6, b"o\n", 0.0), 0.0)
    merge.add(1, Append("supervisor.log", 0, b"there\n", 0.0), 0.0)
    merge.add(0, Append("supervisor.log", 0, b"here\n", 0.0), 0.0)
    merge.add(1, Replace("attempts/0/2/pulse", b"\0\1"), 0.0)
    assert (run.attempt(0, 2) / "stdout.log").read_bytes() == b"one\ntwo\n"
    assert (run.path / "supervisor.log").read_text() == "here\n"
    assert (run.path / "hosts/1/supervisor.log").read_text() == "there\n"
    assert run.heartbeat(0, 2).read_bytes() == b"\0\1"
    assert run.heartbeat(0, 2).stat().st_mode & 0o77 == 0


def test_merge_ignores_data_that_comes_twice(run: RunDir, merge: Merge) -> None:
    for at, data in ((0, b"abc"), (0, b"abc"), (1, b"bcdef")):
        merge.add(0, Append("attempts/0/0/stdout.log", at, data, 0.0), 0.0)
    assert (run.attempt(0, 0) / "stdout.log").read_bytes() == b"abcdef"
    merge.add(1, Append("metrics.jsonl", 0, b'{"a": 1}\n', 0.0), 0.0)
    merge.add(1, Append("metrics.jsonl", 0, b'{"a": 1}\n{"a": 2}\n', 0.0), 0.0)
    assert run.metrics.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_merge_resumes_from_saved_offsets(run: RunDir, merge: Merge) -> None:
    """Also if the process before was killed: all since its last saved offsets is sent again."""
    merge.add(1, Append("attempts/0/2/stdout.log", 0, b"12345", 0.0), 0.0)
    merge.add(1, Append("metrics.jsonl", 0, b'{"a": 1}\n', 0.0), 0.0)
    merge.add(0, Append("run.log", 0, b"[0] one\n", 10.0), 10.0)
    merge.flush(float("inf"))
    merge.add(0, Append("run.log", 8, b"[0] waits\n", 10.0), 10.0)
    merge.save_offsets()
    merge.add(1, Append("metrics.jsonl", 9, b'{"a": 2}\n', 0.0), 0.0)
    merge.flush(float("inf"))
    again = Merge(run, SPEC, (), again=True)
    assert again.offsets == [
        {"run.log": 8},
        {"attempts/0/2/stdout.log": 5, "metrics.jsonl": 9},
    ]
    assert run.metrics.read_text() == '{"a": 1}\n'
    assert run.log.read_text() == "[0] one\n"
    (run.path / "mirror.json").write_text('{"offsets": 3')
    assert Merge(run, SPEC, (), again=True).offsets == [{}, {}]
    assert run.log.read_text() == ""


def test_merge_orders_log_lines_by_corrected_time(run: RunDir) -> None:
    merge = Merge(run, SPEC, (0.0, 100.0))
    merge.add(0, Append("run.log", 0, b"[0] first\n", 10.0), 10.3)
    merge.add(0, Append("run.log", 10, b"[0] third\n", 10.2), 10.3)
    merge.add(1, Append("run.log", 0, b"[2] second\n", 110.1), 10.3)
    merge.flush(10.3)
    assert not run.log.exists()  # an older line may still arrive
    merge.flush(10.11 + HOLD)
    assert run.log.read_text() == "[0] first\n[2] second\n"
    merge.flush(float("inf"))
    assert run.log.read_text() == "[0] first\n[2] second\n[0] third\n"


def test_merge_does_not_hold_back_lines_from_a_fast_clock(run: RunDir, merge: Merge) -> None:
    merge.add(0, Append("run.log", 0, b"[0] from tomorrow\n", 1e6), 10.0)
    merge.flush(10.0 + HOLD)
    assert run.log.read_text() == "[0] from tomorrow\n"


def test_merge_reports_started_ranks_once_all_hosts_have_them(run: RunDir, merge: Merge) -> None:
    say(merge, 1, RanksStarted(0, (7, 8), 1.0))
    assert run.read_events() == []
    say(merge, 0, RanksStarted(0, (5, 6), 2.0))
    assert run.read_events() == [RanksStarted(0, (0, 0, 0, 0), 2.0)]


def test_merge_emits_equal_events_of_hosts_once(run: RunDir, merge: Merge) -> None:
    for host in (0, 1):
        say(
            merge,
            host,
            Note("the same", 1.0),
            Note(f"of {host}", 1.0),
            Stopping("SIGINT", "stopped", 1.0),
            *[Figure(0, 3, 1.0)] * (host == 0),
            RankEnded(0, 2 * host, 0, 1.0),
            Phase(PhaseKind.ENDED, "succeeded", time=1.0),
            Ended(RunState.SUCCEEDED, 1.0),
        )
    told = run.read_events()
    notes = [event.text for event in told if isinstance(event, Note)]
    assert notes == ["the same", "of 0", "h1: of 1"]
    assert sum(isinstance(event, Stopping) for event in told) == 1
    assert [event.rank for event in told if isinstance(event, RankEnded)] == [0, 2]
    assert [event for event in told if isinstance(event, Figure)] == [Figure(0, 3, 1.0)]
    assert not [event for event in told if isinstance(event, Ended | Phase)]


def test_merge_keeps_results_of_hosts_apart_from_that_of_the_run(run: RunDir, merge: Merge) -> None:
    for host in (0, 1):
        merge.add(host, Replace("result.json", json.dumps({"host": host}).encode()), 0.0)
    assert not run.result.exists()
    assert [json.loads(merge.result_of(host).read_bytes())["host"] for host in (0, 1)] == [0, 1]


def test_merge_reports_a_folder_that_cannot_be_written(run: RunDir, merge: Merge) -> None:
    run.path.joinpath("attempts").write_text("in the way")
    merge.add(1, Append("attempts/0/2/stdout.log", 0, b"x", 0.0), 0.0)
    assert "attempts/0/2/stdout.log" in merge.problem


def test_merge_does_not_wait_after_a_clock_was_set_back(run: RunDir, merge: Merge) -> None:
    merge.add(0, Append("run.log", 0, b"[0] before\n", 5000.0), 5000.0)
    merge.flush(1000.0)
    assert run.log.read_text() == "[0] before\n"


def test_merge_ignores_incomplete_saved_offsets(run: RunDir, merge: Merge) -> None:
    """Otherwise files would be cut off whose lines are not sent again."""
    merge.add(1, Append("metrics.jsonl", 0, b'{"a": 1}\n', 0.0), 0.0)
    merge.save_offsets()
    noted = json.loads((run.path / "mirror.json").read_text())
    del noted["offsets"]
    (run.path / "mirror.json").write_text(json.dumps(noted))
    assert Merge(run, SPEC, (0.0, 0.0), again=True).offsets == [{}, {}]
