"""A run's folder in a bucket is complete at the end, whatever the bucket does meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.fakes.bucket import FakeBucket, bucket
from tpunb import cli
from tpunb.errors import TpunbError
from tpunb.runs import bucket_copies, directory
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Metric, Note
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState
from tpunb.runs.tensorboard import TensorBoardWriter
from tpunb.utils import files


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeBucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with bucket() as fake:
        for name, value in fake.env.items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that has not ended."""
    run = directory.create_run(tmp_path / "runs", "digits")
    run.write_spec(RunSpec(run.id, "digits", 2, "CPU", "/", (), ()))
    run.attempt(0, 1).mkdir(parents=True)
    (run.attempt(0, 1) / "stdout.log").write_text("hello\n")
    run.log.write_text("[1] hello\n")
    run.checkpoints.mkdir()
    (run.checkpoints / "000001-step-1.pt").write_bytes(b"x" * 100_000)
    return run


def end(run: RunDir) -> None:
    run.write_result(RunResult(RunState.SUCCEEDED, "digits", 2, "CPU", 1.0, 2.0, run.path))


def names_there(fake: FakeBucket, run: RunDir) -> dict[str, int]:
    import s3fs

    system = s3fs.S3FileSystem(skip_instance_cache=True)
    found = system.find(f"{fake.url}/{run.id}", detail=True)
    return {name.partition(f"{run.id}/")[2]: info["size"] for name, info in found.items()}


def names_here(run: RunDir) -> dict[str, int]:
    return {name: size for name, (size, _) in bucket_copies._files_of(run.path)}


def test_failing_and_slow_answers_delay_the_copy_and_lose_nothing(
    there: FakeBucket, run: RunDir
) -> None:
    lock = run.take_lock()
    assert lock is not None
    there.trouble += ["fail"] * 3 + ["slow", "fail"]

    def grow() -> None:
        files.append_text(run.log, "[1] more\n")
        (run.checkpoints / "000001-step-1.pt").unlink()
        (run.checkpoints / "000002-step-2.pt").write_bytes(b"y" * 5)

    def finish() -> None:
        there.trouble += ["fail"]
        end(run)
        lock.close()

    then = [lambda: None, grow, lambda: None, finish]
    assert bucket_copies.copy_run(
        run, f"{there.url}/{run.id}", lambda _: then.pop(0)() if then else None
    )
    assert names_there(there, run) == names_here(run)
    assert "result.json" in names_here(run)
    assert there.writes.count(f"{run.id}/result.json") == 1
    assert there.writes[-1] == f"{run.id}/result.json"


def test_a_checkpoint_that_is_removed_meanwhile_holds_nothing_up(
    there: FakeBucket, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, place = bucket_copies._open(f"{there.url}/{run.id}")
    (run.checkpoints / "000000-step-0.pt").write_bytes(b"old")
    copied: dict[str, tuple[int, int]] = {}
    real = bucket_copies._files_of

    def then_removed(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
        yield from [*real(folder)]
        (run.checkpoints / "000000-step-0.pt").unlink(missing_ok=True)

    monkeypatch.setattr(bucket_copies, "_files_of", then_removed)
    bucket_copies._copy_changed(run, system, place, copied)
    assert names_there(there, run).keys() == dict(real(run.path)).keys()


@pytest.mark.parametrize(
    "url", ["s3://me:secret@bucket/runs", "s3://bucket/runs?sig=abc", "simplecache::s3://a:b@c/d"]
)
def test_a_url_with_a_secret_is_refused(url: str) -> None:
    with pytest.raises(TpunbError, match="a password or a key") as refused:
        bucket_copies.check_url(url)
    assert "secret@" not in str(refused.value)


def test_upload_to_an_unresponsive_bucket_is_given_up_after_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    end(run)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(bucket_copies, "GIVE_UP", 6)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    assert not bucket_copies.copy_run(run, f"s3://none/{run.id}", lambda _: None)
    [note] = [event for event in run.read_events() if isinstance(event, Note)]
    assert note.text.startswith(f"not copied to s3://none/{run.id} yet, retrying: ")
    told = bucket_copies.wait_for_upload(run, 60.0, lambda: True)
    assert told == f"not all of {run.path} is in the bucket yet"


@pytest.mark.usefixtures("starts_processes")
def test_uploaded_runs_can_be_listed_read_and_opened_in_tensorboard(
    there: FakeBucket, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process copies while the run is going on, and ends soon after it."""
    assert cli.main(["runs", "--runs", there.url]) == 0
    assert capsys.readouterr().out == f"There are no runs in {there.url} yet.\n"
    with pytest.raises(TpunbError, match=f"there are no runs in {there.url}$"):
        directory.find_run(bucket_copies.cached_runs(there.url), None)
    lock = run.take_lock()
    assert lock is not None
    row = {"rank": 0, "attempt": 0, "step": 1, "time": 1.0, "reduce": {}, "loss": 0.25}
    files.append_text(run.metrics, json.dumps(row) + "\n")
    bucket_copies.start_upload(run, there.url)
    process = bucket_copies._started[run.path]
    deadline = time.monotonic() + 120
    while f"{run.id}/run.log" not in there.writes:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert cli.main(["runs", "--runs", there.url]) == 0
    listed = capsys.readouterr().out
    assert run.id in listed
    assert "away" in listed
    writer = TensorBoardWriter(run, 2)
    for rank in (0, 1):
        writer.add(Metric(rank, 1, {"loss": 0.25}))
    writer.close()
    for thread in threading.enumerate():
        if thread.name == "tpunb-tensorboard":
            thread.join()
    end(run)
    lock.close()
    assert bucket_copies.is_copying(run)
    assert process.wait(120) == 0
    assert not bucket_copies.is_copying(run)
    assert bucket_copies.wait_for_upload(run, 1.0, lambda: False) == ""
    assert cli.main(["runs", "--runs", there.url]) == 0
    listed = capsys.readouterr().out
    assert "succeeded" in listed
    assert "loss 0.25" in listed
    assert cli.main(["logs", "--runs", there.url, "digits"]) == 0
    assert "hello" in capsys.readouterr().out
    assert names_there(there, run) == names_here(run)
    curves = EventAccumulator(f"{there.url}/{run.id}").Reload()
    assert [event.value for event in curves.Scalars("loss")] == [0.25]
    with pytest.raises(SystemExit):
        cli.main(["stop", "--runs", there.url])
    [cached] = directory.list_runs(bucket_copies.cached_runs(there.url))
    assert cached.id == run.id
