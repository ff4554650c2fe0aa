from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from tpunb import rundir
from tpunb.errors import TpunbError
from tpunb.events import Ended, Metric, Note, Output, Phase, from_line, to_line
from tpunb.models import Block, RunSpec
from tpunb.rundir import Follower, LineTail, RunDir


def spec_of(run: RunDir, ranks: int = 2) -> RunSpec:
    blocks = (Block("header", 1, 1), Block("train", 2, 3, 0, 7))
    return RunSpec(run.id, "n", ranks, "CPU", "/", ("a", "b"), blocks, returns=("x",))


def test_a_run_folder_is_private_and_its_id_unique(tmp_path: Path) -> None:
    first, second = (rundir.create(tmp_path / "runs", "my run/ü") for _ in range(2))
    assert first.id != second.id
    assert first.id.endswith("my-run-ü")
    assert first.path.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TpunbError, match="--runs DIR"):
        rundir.create(tmp_path / "file", "x")


def test_a_spec_comes_back_as_it_was(tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "x")
    spec = spec_of(run)
    rundir.write_json(run.spec, spec.to_json())
    assert run.read_spec() == spec
    assert spec.locate(3) == (7, 2)
    assert spec.locate(1) == (None, None)


def test_runs_are_found_by_any_part_of_their_id(tmp_path: Path) -> None:
    made = []
    for name in ("alpha", "beta", "beta2"):
        made.append(rundir.create(tmp_path, name))
        rundir.write_json(made[-1].spec, spec_of(made[-1]).to_json())
    (tmp_path / "not-a-run").mkdir()
    assert [run.id for run in rundir.runs_in(tmp_path)] == [run.id for run in made]
    assert rundir.find(tmp_path, None).id == made[2].id
    assert rundir.find(tmp_path, "alph").id == made[0].id
    assert rundir.find(tmp_path, made[1].id).id == made[1].id
    with pytest.raises(TpunbError, match=r"several runs: .*beta, .*beta2"):
        rundir.find(tmp_path, "beta")
    with pytest.raises(TpunbError, match=r"the latest are: .*alpha"):
        rundir.find(tmp_path, "gamma")
    with pytest.raises(TpunbError, match="no runs"):
        rundir.find(tmp_path / "none", None)


@pytest.mark.parametrize("event", [Phase("training", 1.5), Note("n", 2.0), Ended("failed", 3.0)])
def test_events_come_back_as_they_were(event: Phase | Note | Ended) -> None:
    assert from_line(to_line(event)) == event


def write_lines(path: Path, letter: str) -> None:
    for _ in range(500):
        rundir.append(path, letter * 200 + "\n")


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_lines, args=(path, letter)) for letter in "abc"]
    for writer in writers:
        writer.start()
    tail, seen = LineTail(path), []
    while any(writer.is_alive() for writer in writers):
        seen += tail.read()
    for writer in writers:
        writer.join()
    seen += tail.read()
    tail.close()
    assert sorted(seen) == [letter * 200 for letter in "abc" for _ in range(500)]


def test_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = LineTail(path)
    assert tail.read() == []
    for text, whole in [("a\nb", ["a"]), ("c", []), ("\n", ["bc"])]:
        rundir.append(path, text)
        assert tail.read() == whole
    tail.close()


def test_a_follower_gives_everything_once_outputs_before_events(tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "x")
    follower = Follower(run, 2)
    assert list(follower.read()) == []
    for rank in (0, 1):
        run.attempt(0, rank).mkdir(parents=True)
        (run.attempt(0, rank) / "stdout.log").write_bytes("é".encode()[:1] if rank else b"hi\n")
    run.emit(Phase("training"))
    row = {"rank": 1, "attempt": 2, "step": 3, "time": 1.5, "reduce": {"loss": "max"}, "loss": 0.5}
    rundir.append(run.metrics, json.dumps(row) + "\n")
    output, metric, phase = follower.read()
    assert output == Output(0, "stdout", "hi\n")
    assert metric == Metric(1, 3, {"loss": 0.5}, {"loss": "max"}, 1.5, 2)
    assert isinstance(phase, Phase)
    assert phase.time > 0
    with open(run.attempt(0, 1) / "stdout.log", "ab") as file:
        file.write("é".encode()[1:])
    assert list(follower.read()) == [Output(1, "stdout", "é")]
    follower.close()


def test_a_run_without_a_guard_is_not_running(tmp_path: Path) -> None:
    run = rundir.create(tmp_path, "x")
    assert not run.is_running()
    run.lock.write_text("")
    assert not run.is_running()
    import fcntl

    with open(run.lock) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run.is_running()
    assert os.path.exists(run.lock)
