"""Failures, exits that only follow from a stop, and the failed lines in the notebook."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tpunb.runs import directory
from tpunb.runs.directory import RunDir
from tpunb.runs.protocol import HostEnded, ImportsFailed
from tpunb.runs.result import Failure, RunResult
from tpunb.runs.spec import Block, FailureKind, RunSpec, Stop, StopCause
from tpunb.runs.trained_models import DifferentModels, SteppedModel
from tpunb.utils import files
from tpunb.worker.supervisor.outcome import (
    LONGEST,
    ProcessExit,
    RunObservation,
    build_result,
    merge_results,
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
        (ProcessExit(None, None, -9, NOW, fork_server=True), FailureKind.LOST),
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
    end = ProcessExit(None, None, 1, NOW, fork_server=True)
    why = ImportsFailed("SetupError", "use another torch", of_tpunb)
    result = result_of(tmp_path, end, imports_failed=why, fork_server_output="Traceback …")
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


class TestSeveralHosts:
    """Host 0's result, from its own and those of the other hosts."""

    SPEC = RunSpec("id", "n", 4, "CPU", "/", (), (), hosts=("h0", "h1"))

    def part(self, folder: Path, node_rank: int, *exits: ProcessExit, **seen: object) -> RunResult:
        run = directory.create_run(folder, "n")
        stop = seen.pop("stop", None)
        if stop is not None:
            seen.setdefault("stopped", NOW)
        for rank, error in seen.pop("errors", {}).items():  # type: ignore[attr-defined]
            run.error(0, rank).parent.mkdir(parents=True, exist_ok=True)
            files.write_json(run.error(0, rank), error)
        observation = RunObservation(
            NOW - 9, NOW + 1, list(exits), stop, 0, None, None,
            ranks=self.SPEC.ranks_on(node_rank), host=self.SPEC.hosts[node_rank], **seen,
        )  # type: ignore[arg-type]  # fmt: skip
        return build_result(run, self.SPEC, observation)

    def ends(self, *ranks: int, code: int = 0, at: float = 0.0) -> list[ProcessExit]:
        return [ProcessExit(rank, 10 + rank, code, NOW + at, 100 + rank) for rank in ranks]

    def test_merged_result_has_failures_and_memory_of_all_hosts(self, tmp_path: Path) -> None:
        stop = Stop(StopCause.PEER_FAILED, "rank h1/2 has failed")
        own = self.part(tmp_path, 0, *self.ends(0, 1), stop=stop, stopped=NOW + 0.5)
        assert own.failures == ()  # it is stopped for one of another host
        exits = self.ends(2, code=1) + self.ends(3)
        errors = {2: {**VALUE, "time": NOW}}
        other = self.part(tmp_path, 1, *exits, stop=stop, stopped=NOW + 0.5, errors=errors)
        whole = merge_results(own, stop, NOW + 0.5, [HostEnded(other.to_json(), 0.0)])
        assert whole.state == "failed"
        assert whole.returncode == 1
        assert [(failure.host, failure.rank) for failure in whole.failures] == [("h1", 2)]
        assert whole.peak_memory == (100, 101, 102, 103)

    def test_merged_failures_are_ordered_by_the_clock_of_host_0(self, tmp_path: Path) -> None:
        """Host 1's clock is 60 s ahead."""
        stop = Stop(StopCause.PEER_FAILED, "a rank has failed")
        own = self.part(
            tmp_path, 0, *self.ends(0, code=1, at=1.0), errors={0: {**VALUE, "time": NOW + 1.0}}
        )
        later = {2: {**VALUE, "time": NOW + 60.0}}
        other = self.part(tmp_path, 1, *self.ends(2, code=1, at=60.0), errors=later)
        whole = merge_results(own, stop, NOW + 2, [HostEnded(other.to_json(), 60.0)])
        assert [failure.host for failure in whole.failures] == ["h1", "h0"]

    def test_lost_host_comes_before_failures_it_caused(self, tmp_path: Path) -> None:
        gone = Failure.of(FailureKind.HOST_LOST, "host h1 was lost", time=NOW - 1, host="h1")
        stop = Stop(StopCause.HOST_LOST, "host h1 was lost")
        own = self.part(
            tmp_path,
            0,
            *self.ends(0, code=1),
            stop=stop,
            host_failures=(gone,),
            errors={0: {**VALUE, "time": NOW - 0.5}},
        )
        whole = merge_results(own, stop, NOW, [])
        assert whole.state == "failed"
        assert [failure.kind for failure in whole.failures] == ["host_lost", "exception"]
        assert whole.headline() == "host h1 was lost"

    def test_models_of_hosts_are_compared_by_their_first_ranks(self, tmp_path: Path) -> None:
        def merged(first: float, second: float) -> DifferentModels | None:
            parts = [self.part(tmp_path, n, *self.ends(2 * n, 2 * n + 1)) for n in range(2)]
            run = RunDir(parts[0].dir)
            run.attempt(0, 0).mkdir(parents=True)
            model = SteppedModel("SGD", "line 3", False, 1e-5, ((first,),))
            files.write_json(run.models(0, 0), [asdict(model)])
            other = asdict(replace(model, values=((second,),)))
            ended = HostEnded(parts[1].to_json(), 0.0, [other])
            return merge_results(parts[0], None, math.inf, [ended]).different_models

        assert merged(1.0, 1.0) is None
        found = merged(1.0, 2.0)
        assert found is not None
        assert (found.ranks, found.difference) == ((0, 2), 0.5)

    def test_hang_report_lists_the_ranks_of_all_hosts(self, tmp_path: Path) -> None:
        def hang(where: str) -> Failure:
            message = f"no activity for 300 s:\n{where}\nGive it more time."
            return Failure.of(FailureKind.HANG, message, cell=3, line=4, traceback=where, time=NOW)

        stop = Stop(StopCause.HUNG, "no activity")
        own = self.part(tmp_path, 0, stop=stop, hang=hang("ranks 0, 1: in xm.mark_step"))
        other = self.part(tmp_path, 1, stop=stop, hang=hang("rank 2: a\nrank 3: b"))
        whole = merge_results(own, stop, NOW, [HostEnded(other.to_json(), 0.0)])
        assert whole.state == "hung"
        (failure,) = whole.failures
        assert failure.message == (
            "no activity for 300 s:\nh0: ranks 0, 1: in xm.mark_step\nh1: rank 2: a\n"
            "h1: rank 3: b\nGive it more time."
        )
