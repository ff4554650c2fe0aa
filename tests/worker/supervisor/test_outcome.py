"""Failures, exits that only follow from a stop, and the failed lines in the notebook."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import ImportsFailed
from tpunb.runs.result import Failure
from tpunb.runs.spec import Block, FailureKind, RunSpec, Stop, StopCause
from tpunb.utils import files
from tpunb.worker.supervisor.outcome import (
    LONGEST,
    ProcessExit,
    RunObservation,
    build_result,
    with_source,
)

SPEC = RunSpec("id", "n", 2, "CPU", "/", (), ())
NOW = time.time()
ERROR = {"message": "", "cell": None, "line": None, "traceback": "", "kind": "exception"}
LOST = {**ERROR, "type": "PeerLostError", "kind": "peer_lost"}
INTERRUPT = {**ERROR, "type": "KeyboardInterrupt"}
VALUE = {**ERROR, "type": "ValueError"}


def result_of(
    folder: Path,
    *exits: ProcessExit,
    cause: StopCause | None = None,
    errors: dict[int, dict[str, object]] | None = None,
    **seen: object,
):
    """The observation of a run, which was stopped at NOW if `stop` is given."""
    run = directory.create_run(folder, "n")
    for rank, error in (errors or {}).items():
        run.error(0, rank).parent.mkdir(parents=True, exist_ok=True)
        files.write_json(run.error(0, rank), error)
    stop = None if cause is None else Stop(cause, "enough")
    if stop is not None:
        seen["stopped"] = NOW
    observation = RunObservation(NOW - 9, NOW + 1, list(exits), stop, 0, None, None, **seen)
    return build_result(run, SPEC, observation)


@pytest.mark.parametrize(
    ("cause", "after", "state", "failures"),
    [
        (StopCause.USER, 0.1, "interrupted", 0),  # the other had its signal, and ended, earlier
        (StopCause.TIMEOUT, 0.1, "timed_out", 0),
        (StopCause.USER, -0.1, "failed", 1),
        (StopCause.PEER_FAILED, 0.1, "failed", 1),
    ],
)
def test_peer_lost_error_after_a_stop_is_no_failure(
    tmp_path: Path, cause: StopCause, after: float, state: str, failures: int
) -> None:
    result = result_of(
        tmp_path,
        ProcessExit(0, 11, 130, NOW + 0.05, signals_sent=frozenset({"SIGINT"})),
        ProcessExit(1, 12, 1, NOW + 0.2, signals_sent=frozenset({"SIGINT"})),
        cause=cause,
        errors={1: {**LOST, "time": NOW + after}},
    )
    assert (result.state, len(result.failures)) == (state, failures)
    assert result.stop == Stop(cause)


SENT = frozenset({"SIGINT", "SIGTERM"})


@pytest.mark.parametrize(
    ("end", "error", "state"),
    [
        (ProcessExit(0, 11, -15, NOW + 1, signals_sent=SENT), None, "interrupted"),
        (ProcessExit(0, 11, 130, NOW + 1, signals_sent=SENT), None, "interrupted"),
        (ProcessExit(0, 11, 130, NOW + 1, signals_sent=SENT), INTERRUPT, "interrupted"),
        # Before the stop, or by a signal that tpunb has not sent: not caused by the stop.
        (ProcessExit(0, 11, -15, NOW - 1), None, "failed"),
        (ProcessExit(0, 11, 130, NOW - 1), INTERRUPT, "failed"),
        (ProcessExit(0, 11, 1, NOW - 1), VALUE, "failed"),
        # The rank fails while it saves: the user has stopped it, and sees the error as well.
        (ProcessExit(0, 11, 1, NOW + 1, signals_sent=SENT), VALUE, "interrupted"),
    ],
)
def test_rank_end_around_a_stop_gives_the_state(
    tmp_path: Path, end: ProcessExit, error: dict[str, object] | None, state: str
) -> None:
    errors = {} if error is None else {0: {**error, "time": end.time}}
    result = result_of(tmp_path, end, cause=StopCause.USER, errors=errors)
    assert result.state == state
    assert bool(result.failures) == (state == "failed" or error is VALUE)


@pytest.mark.parametrize("cause", [None, StopCause.PEER_FAILED])
def test_success_needs_the_finished_end_of_all_ranks(
    tmp_path: Path, cause: StopCause | None
) -> None:
    ends = [ProcessExit(rank, 11 + rank, 0, NOW + 0.1) for rank in (0, 1)]
    assert result_of(tmp_path, *ends).state == "succeeded"
    for ended in ([], ends[:1], [ends[0], replace(ends[1], finished=False)]):
        result = result_of(tmp_path, *ended, cause=cause)
        assert (result.state, result.returncode) == ("failed", 1)
        assert result.failure is not None
        assert result.failure.kind is FailureKind.EXIT
        assert result.failure.rank == (1 if ended else 0)
        assert "the end of the train cell" in result.failure.headline()


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ProcessExit(0, 11, 3, NOW), FailureKind.EXIT),
        (ProcessExit(0, 11, -11, NOW), FailureKind.SIGNAL),
        (ProcessExit(0, 11, -9, NOW), FailureKind.SIGNAL),  # a guess at memory is no evidence
        (ProcessExit(0, 11, -9, NOW, memory="the kernel's log: …"), FailureKind.OUT_OF_MEMORY),
        (ProcessExit(None, None, -9, NOW, fork_server_output=""), FailureKind.LOST),
    ],
)
def test_failure_kind_without_an_exception(
    tmp_path: Path, end: ProcessExit, kind: FailureKind
) -> None:
    result = result_of(tmp_path, end)
    assert result.state == "failed"
    assert [failure.kind for failure in result.failures] == [kind]
    assert type(result).from_json(json.loads(json.dumps(result.to_json())), result.dir) == result


@pytest.mark.parametrize("of_tpunb", [True, False])
def test_the_exception_that_ended_the_fork_server_is_the_failure(
    tmp_path: Path, of_tpunb: bool
) -> None:
    why = ImportsFailed("SetupError", "use another torch", of_tpunb)
    end = ProcessExit(None, None, 1, NOW, fork_server_output="Traceback …", imports_failed=why)
    result = result_of(tmp_path, end)
    assert result.failure is not None
    assert (result.failure.kind, result.failure.type) == (FailureKind.LOST, "SetupError")
    failed = "the fork server, which starts the processes of a run, failed: SetupError: "
    assert result.headline() == ("" if of_tpunb else failed) + "use another torch"
    assert result.failure.traceback == ("" if of_tpunb else "Traceback …")


def test_hang_comes_before_failures_caused_by_its_stop(tmp_path: Path) -> None:
    hang = Failure.of(FailureKind.HANG, "", time=NOW)
    end = ProcessExit(0, 11, 1, NOW - 1)
    result = result_of(tmp_path, end, cause=StopCause.HUNG, hang=hang)
    assert result.state == "hung"
    assert [failure.kind for failure in result.failures] == [FailureKind.HANG, FailureKind.EXIT]


FAILURE = Failure(2, 12, 1, None, "ValueError", "no data", 7, 3, "", 1.0)
BLOCKS = (Block("prelude", 1, 2, 0, 6), Block("train", 3, 8, 1, 7))
PLACES = RunSpec("id", "n", 4, "CPU", "/", (), BLOCKS)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "script.py").write_text("\n".join(f"line {n}" for n in range(1, 9)))
    return RunDir(tmp_path)


def test_failure_source_has_cell_line_numbers(run: RunDir) -> None:
    assert with_source(FAILURE, PLACES, run).source == (
        (1, "line 3"),
        (2, "line 4"),
        (3, "line 5"),
        (4, "line 6"),
        (5, "line 7"),
    )
    assert with_source(replace(FAILURE, line=6), PLACES, run).source[-1] == (6, "line 8")


def test_failure_source_is_from_the_cell_and_cut_around_the_error(run: RunDir) -> None:
    long = "x = [" + "0, " * 100 + "missing]" + " + 1" * 100
    own = ["%%tpu_train", long, *(f"line {n}" for n in range(5, 9))]
    run.snapshot.write_text(
        json.dumps({"cells": [{"id": "a", "source": ""}, {"id": "b", "source": "\n".join(own)}]})
    )
    column = long.index("missing")
    failed = with_source(replace(FAILURE, line=2, column=column), PLACES, run)
    (_, first), (_, cut), (_, third), _ = failed.source
    assert (first, third) == ("%%tpu_train", "line 5")
    assert "missing]" in cut
    assert (len(cut), cut[0], cut[-1]) == (LONGEST, "…", "…")
    beside = with_source(replace(FAILURE, line=3), PLACES, run)
    assert beside.source[1][1] == f"{long[: LONGEST - 1]}…"
    run.snapshot.write_text('{"cells": [')  # a crash has left half a file
    assert with_source(FAILURE, PLACES, run).source[0] == (1, "line 3")


def test_result_of_a_run_on_hosts_names_the_host_of_each_failure(tmp_path: Path) -> None:
    """Also of a prelude, whose files are in the host's own folder."""
    gone = Failure.of(FailureKind.HOST_LOST, "host h1 was lost", time=NOW - 1, host="h1")
    run = directory.create_run(tmp_path, "n")
    for path, at in ((run.error(0, 0), NOW), (run.host(1).error(0, None), NOW - 0.5)):
        path.parent.mkdir(parents=True)
        files.write_json(path, {**VALUE, "time": at})
    exits = [ProcessExit(0, 10, 1, NOW, 100), ProcessExit(None, 11, 1, NOW, node=1)]
    stop = Stop(StopCause.HOST_LOST, "host h1 was lost")
    seen = RunObservation(
        NOW - 9, NOW + 1, exits, stop, 0, None, None, stopped=NOW, host_failures=(gone,)
    )
    spec = replace(SPEC, hosts=("h0", "h1"))
    result = build_result(run, spec, seen)
    assert [(each.host, each.kind, each.rank) for each in result.failures] == [
        ("h1", FailureKind.HOST_LOST, None),
        ("h1", FailureKind.EXCEPTION, None),
        ("h0", FailureKind.EXCEPTION, 0),
    ]
    assert (result.state, result.headline()) == ("failed", "host h1 was lost")
