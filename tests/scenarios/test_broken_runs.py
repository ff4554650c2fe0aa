"""Whatever is in a run folder, everything that reads it comes to its end, and shows the others.

A full disk and a power cut leave files in part; people edit and copy them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kernel import until
from tests.runs.test_listing import made
from tpunb.errors import TpunbError
from tpunb.kernel.launcher import Attached
from tpunb.runs import compare, directory, listing, logs, returns, state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Metric, Note, Output, Phase
from tpunb.runs.spec import Block, PhaseKind, RunState

FILES = (
    "spec.json",
    "result.json",
    "events.jsonl",
    "metrics.jsonl",
    "notebook.json",
    "values.json",
    "env.json",
    "returns/report.json",
    "attempts/0/0/error.json",
    "attempts/0/0/progress.json",
    "attempts/0/0/pulse",
    "attempts/0/0/saving.txt",
    "run.log",
    "running.lock",
)
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"state": "succ',
    "zeros": bytes(5000),  # what some file systems leave after a power cut
    "no UTF-8": b'{"name": "\xff\xfe"}\n',
    "null": b"null\n",
    "number": b"7\n",
    "list": b"[]\n[1]\n",
    "empty": b"{}\n",
    "list of dicts": b'[{"state": "failed"}]\n',
    "deep": b"[" * 100_000 + b"\n",
    "long number": b'{"time": ' + b"9" * 5000 + b"}\n",
    "no number": b'{"rank": 0, "step": 1, "time": NaN, "loss": 1}\n',
    "one line": b"x" * 3_000_000,
}
VALUES = (None, "text", -1, 10**30, 1e300, [], {}, [None], {"a": None}, True)


def whole(folder: Path, name: str) -> RunDir:
    """A run folder with all that a run leaves."""
    run = made(folder, name, state="failed")
    block = Block("train", 1, 1, 0, 1)
    run.write_spec(replace(run.read_spec(), returns=("w",), blocks=(block,)))
    result = json.loads(run.result.read_text())
    failure = {
        **dict.fromkeys(("rank", "cell", "line", "exitcode", "signal", "pid")),
        **{"type": "KeyError", "message": "m", "traceback": "t", "time": 5.0, "kind": "exception"},
    }
    stop = {"cause": "interrupt", "origin": None}
    price = {"per_hour": 1.0, "what": "v", "date": "d", "source": "s"}
    result |= {"failures": [failure], "stop": stop, "price": price, "peak_memory": [1]}
    row = {"rank": 0, "step": 1, "operation": "x", "calls": 1, "bytes": 1, "waited": 0, "took": 0}
    result["collectives"] = [row]
    run.result.write_text(json.dumps(result))
    cell = {"index": 0, "kind": "code", "source": "lr = 0.1", "tags": []}
    run.snapshot.write_text(json.dumps({"cells": [cell], "train": 1}))
    run.values.write_text('{"a": 1}')
    run.env.write_text("{}")
    run.emit(Phase(PhaseKind.TRAINING, "training"))
    run.metrics.write_text('{"rank": 0, "attempt": 0, "step": 1, "time": 1.5, "loss": 0.5}\n' * 2)
    run.log.write_text("[0] a line\n[1] other\n")
    rank = run.attempt(0, 0)
    rank.mkdir(parents=True)
    (rank / "stdout.log").write_text("a line\n")
    (rank / "stderr.log").write_text("t")
    (rank / "error.json").write_text(json.dumps(failure))
    (rank / "progress.json").write_text('{"bars": [{"name": "e", "done": 1}], "samples": 2}')
    (rank / "pulse").write_bytes(bytes(56))
    (rank / "saving.txt").write_text("0.5\n")
    run.returns.mkdir()
    (run.returns / "report.json").write_text('{"w": {"error": "none"}}')
    run.emit(Ended(RunState.FAILED))
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def look_at_everything(runs: Path, run: RunDir, healthy: RunDir) -> list[Any]:
    """What each way to look at runs does; the events that one who attaches to the run gets."""
    assert healthy.id in str(listing.list_runs(runs))
    listing.find_old(runs, None, 0)
    assert compare.runs(runs).loc[healthy.id, "best.loss"] == 0.5
    with suppress(TpunbError):
        state.find_active(runs, None)
    seen: list[Any] = []
    with suppress(TpunbError):  # it is lost, or active: which one depends on what is broken
        list(logs.read_lines(run, logs.LogSearch(tail=1)))
        logs.read_for_cell(run, logs.LogSearch(level="error"))
    with suppress(TpunbError):
        attached = Attached(run)
        seen += [event for event in attached.events() if event is not None]
        result = returns.collect_returns(attached.result(), attached.spec, run)
        result.explain()
        str(result)
    return seen


def broken_ways(run: RunDir) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Names of ways to break a file, and how."""
    for name, data in TEXTS.items():
        yield name, lambda path, data=data: path.write_bytes(data)
    yield "missing", lambda path: path.unlink()
    yield "folder", lambda path: (path.unlink(), path.mkdir())
    yield "FIFO", lambda path: (path.unlink(), os.mkfifo(path))
    yield "link to itself", lambda path: (path.unlink(), path.symlink_to(path))


@pytest.mark.parametrize("file", ["spec.json", "result.json", "notebook.json"])
def test_broken_json_fields_do_not_break_commands(folder: Path, file: str) -> None:
    healthy = whole(folder, "healthy")
    run = whole(folder, "broken")
    path = run.path / file
    good = path.read_text()
    for name in json.loads(good):
        for value in VALUES:
            path.write_text(json.dumps({**json.loads(good), name: value}))
            age(run)
            try:
                str(listing.list_runs(folder))
                assert state.run_state(run) in RunState
                with suppress(TpunbError):
                    result = Attached(run).result()
                    str(result), result.explain()
                    list(logs.read_lines(run, logs.LogSearch(ranks="0")))
            except Exception as error:
                raise AssertionError(f"{file}: {name}: {value!r}") from error
    assert healthy.id in compare.runs(folder).index


@pytest.mark.parametrize("file", ["events.jsonl", "metrics.jsonl"])
def test_broken_metrics_and_event_lines_are_skipped_and_counted(folder: Path, file: str) -> None:
    run = whole(folder, "broken")
    path = run.path / file
    first, rest = path.read_text().split("\n", 1)
    good = json.loads(first)
    bad = [json.dumps({**good, name: value}) for name in good for value in ([1], {"b": 1})]
    bad += ['{"rank": 0, "lo', "[]", "7"]
    path.write_text("\n".join([first, *bad, rest]))
    seen = [event for event in Attached(run).events() if event is not None]
    [note] = [event.text for event in seen if isinstance(event, Note)]
    assert note == f"{len(bad)} lines of {file} cannot be read: incomplete or edited"
    assert len([event for event in seen if isinstance(event, Metric)]) == 2
    assert [event.text for event in seen if isinstance(event, Output)] == ["a line\n", "t"]
    assert isinstance(seen[-1], Ended)
    assert compare.runs(folder)["best.loss"].tolist() == [0.5]
    assert compare.plot(folder=folder).axes


def test_broken_file_times_in_the_future_still_give_a_lost_run(folder: Path) -> None:
    healthy = whole(folder, "healthy")
    run = whole(folder, "future")
    run.result.unlink()
    for later in (2.0, 3600.0, 3e9, 1e10):
        age(run, -later)
        assert state.run_state(run) is RunState.LOST
        look_at_everything(folder, run, healthy)
        run.lock.unlink()
        until(lambda: is_lost_later(run), "it is lost without a lock, too")
        run.lock.touch()


def is_lost_later(run: RunDir) -> bool:
    """In an hour. The one who has just attached may write TensorBoard's file only now."""
    os.utime(run.path, (time.time() + 3600,) * 2)
    return state.run_state(run) is RunState.LOST


def age(run: RunDir, seconds: float = 3600.0) -> None:
    """Make all files older."""
    for path in [*run.path.rglob("*"), run.path]:
        with suppress(FileNotFoundError):  # TensorBoard's, of one who has just attached
            os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)
    assert directory.list_runs(run.path.parent)
