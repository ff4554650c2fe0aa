"""The mirror, with a place that sends messages without any host."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.drivers.kernel import until
from tpunb.places import mirror
from tpunb.places.config import PlaceConfig, SshSettings
from tpunb.places.errors import HostsError, PlaceError
from tpunb.places.mirror import Mirror, MirrorProcess, wait_until_taken
from tpunb.places.place import Cancelled, Check, ConnectionLost, HostLine, HostsRun, Place, Say
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Ended, Phase, to_line
from tpunb.runs.result import RunResult
from tpunb.runs.spec import FailureKind, PhaseKind, RunSpec, RunState, StopCause, StopOrigin
from tpunb.runs.stream import Append, End, Hello, Line, Replace, Stop

SPEC = RunSpec("run", "pod", 4, "CPU", "/", (), (), hosts=("h0", "h1"), place="pod")


class ScriptedPlace(Place):
    """A place that sends given messages, and records its calls."""

    def __init__(
        self, run: RunDir, said: Sequence[HostLine | None], *, detached: bool = False
    ) -> None:
        place = PlaceConfig("pod", "ssh", Path("places.toml"), SshSettings(hosts=("h0", "h1")))
        placed = HostsRun(
            *(place, ("h0", "h1"), ("a", "b"), ("/r", "/r"), "python3", 1, "/", "/w"),
            detached=detached,
        )
        super().__init__(run, placed)
        placed.write(run)
        self.said = said
        self.stops: list[Stop] = []
        self.fetched: list[tuple[Sequence[str], Sequence[int] | None]] = []
        self.refuses: Exception | None = None
        self.let_go_of = False

    def start(self, variables: Mapping[str, str], say: Say, cancelled: Check) -> None:
        if self.refuses is not None:
            raise self.refuses
        if cancelled():
            raise Cancelled

    def follow(self, since: Sequence[Mapping[str, int]]) -> Iterator[HostLine | None]:
        yield from self.said

    def state(self) -> RunState | None:
        return None

    def stop(self, request: Stop) -> None:
        self.stops.append(request)

    def fetch(
        self, patterns: Sequence[str], into: Path, hosts: Sequence[int] | None = None
    ) -> list[Path]:
        self.fetched.append((patterns, hosts))
        return []

    def release_lifelines(self) -> None:
        self.let_go_of = True

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.write_spec(SPEC)
    return run


def result_of(state: RunState, **values: object) -> Line:
    made = RunResult(state, "pod", 4, "CPU", 1.0, 2.0, Path("/r"), hosts=("h0", "h1"))
    return Replace("result.json", json.dumps({**made.to_json(), **values}).encode())


def hello(host: int) -> Line:
    return Hello("run", host, f"h{host}")


def followed(run: RunDir, place: ScriptedPlace) -> RunResult | None:
    made = Mirror(run, place, stays=True, again=False)
    if made.begin({}):
        made.follow()
    return run.read_result()


def test_mirror_result_comes_from_host_0(run: RunDir) -> None:
    said = [
        HostLine(0, result_of(RunState.SUCCEEDED)),
        HostLine(1, result_of(RunState.SUCCEEDED, ended=9.0)),
        *(HostLine(host, End(0)) for host in (0, 1)),
    ]
    place = ScriptedPlace(run, said)
    result = followed(run, place)
    assert result is not None
    assert (result.state, result.ended, result.place) == (RunState.SUCCEEDED, 2.0, "pod")
    assert place.stops == place.fetched == []
    assert run.read_events()[-1].__class__ is Ended


def test_mirror_start_phase_lists_missing_hosts(run: RunDir) -> None:
    queued = to_line(Phase(PhaseKind.QUEUED, "waits for run x")).encode()
    said = [
        HostLine(1, hello(1)),
        HostLine(0, hello(0)),
        HostLine(0, Append("events.jsonl", 0, queued, 1.0)),
    ]
    followed(run, ScriptedPlace(run, [*said, HostLine(1, hello(1)), HostLine(0, End(0))]))
    assert [event.text for event in run.read_events() if isinstance(event, Phase)][:5] == [
        "starting",
        "starting, waiting for h0, h1",
        "starting, waiting for h0",
        "starting",
        "waits for run x",
    ]


def test_a_run_is_taken_once_every_host_has_answered(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "place pod has not confirmed that it has the run: `tpunb attach"
    with pytest.raises(PlaceError, match=said):
        wait_until_taken(run, lambda: True)
    monkeypatch.setattr(mirror, "TAKEN", 0.0)  # the tool prints nothing, or anything
    with pytest.raises(PlaceError, match=said):
        wait_until_taken(run, lambda: False)
    monkeypatch.undo()
    followed(
        run, ScriptedPlace(run, [HostLine(1, hello(1)), HostLine(0, End(1)), HostLine(1, End(1))])
    )
    wait_until_taken(run, lambda: False)  # it has failed before
    assert not run.taken.exists()
    run.result.unlink()
    followed(
        run, ScriptedPlace(run, [HostLine(1, hello(1)), HostLine(0, hello(0)), HostLine(0, End(0))])
    )
    run.result.unlink()
    wait_until_taken(run, lambda: False)


def test_returns_are_fetched_from_host_0(run: RunDir) -> None:
    run.write_spec(replace(SPEC, returns=("a",)))
    place = ScriptedPlace(run, [HostLine(0, result_of(RunState.SUCCEEDED)), HostLine(0, End(0))])
    followed(run, place)
    assert place.fetched == [(["returns"], [0])]


@pytest.mark.usefixtures("starts_processes")
def test_crash_of_the_mirror_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    mirror = MirrorProcess(RunDir(tmp_path), variables=None, stays=True)
    os.kill(mirror.pid, signal.SIGKILL)
    until(mirror.has_exited, "it is killed")
    assert mirror.broken.startswith("the process that follows the run was killed (SIGKILL)")


def test_lost_host_stops_the_others_and_is_named(run: RunDir) -> None:
    place = ScriptedPlace(
        run,
        [
            HostLine(0, ConnectionLost("Connection reset by peer (exit code 255)")),
            HostLine(1, result_of(RunState.FAILED)),
            HostLine(1, End(1)),
        ],
    )
    result = followed(run, place)
    assert [stop.cause for stop in place.stops] == [StopCause.HOST_LOST]
    assert result is not None
    assert result.state is RunState.FAILED
    [failure] = result.failures
    assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, "h0")
    assert failure.message == "h0 was lost: Connection reset by peer (exit code 255)"


def test_lost_connections_without_a_result_are_the_failures(run: RunDir) -> None:
    said = [HostLine(host, ConnectionLost("gone")) for host in (0, 1)]
    result = followed(run, ScriptedPlace(run, said))
    assert result is not None
    assert [failure.host for failure in result.failures] == ["h0", "h1"]
    assert result.state is RunState.FAILED


def test_host_that_could_not_start_gives_its_reason(run: RunDir) -> None:
    said = [
        HostLine(1, End(2, "no key")),
        HostLine(0, result_of(RunState.FAILED)),
        HostLine(0, End(1)),
    ]
    place = ScriptedPlace(run, said)
    followed(run, place)
    assert [(stop.cause, stop.reason) for stop in place.stops] == [
        (StopCause.HOST_LOST, "h1: no key")
    ]


def test_detached_run_is_away_if_no_host_answers(run: RunDir) -> None:
    said = [HostLine(host, ConnectionLost("no route to host")) for host in (0, 1)]
    place = ScriptedPlace(run, said, detached=True)
    assert followed(run, place) is None
    assert place.stops == []
    assert run.is_away()


@pytest.mark.parametrize(
    ("refuses", "host", "said"),
    [
        (HostsError("pod", (("h1", "the disk is full"),)), "h1", "the disk is full"),
        (FileNotFoundError(2, "No such file or directory", "data.csv"), None, "data.csv"),
    ],
)
def test_errors_at_the_start_are_failures_in_the_result(
    run: RunDir, refuses: Exception, host: str | None, said: str
) -> None:
    place = ScriptedPlace(run, [])
    place.refuses = refuses
    result = followed(run, place)
    assert result is not None
    [failure] = result.failures
    assert (failure.kind, failure.host) == (FailureKind.REFUSED, host)
    assert said in failure.message


def test_a_stop_before_the_hosts_have_begun(run: RunDir) -> None:
    state.request_stop(run, Stop(reason="stopped with tpunb stop", origin=StopOrigin.COMMAND))
    result = followed(run, ScriptedPlace(run, []))
    assert result is not None
    assert (result.state, result.reason) == (RunState.INTERRUPTED, "stopped with tpunb stop")
    assert result.stop is not None
    assert result.stop.origin is StopOrigin.COMMAND


def test_stop_requests_are_passed_to_the_place(run: RunDir) -> None:
    def ask() -> Iterator[HostLine | None]:
        state.request_stop(run, Stop(reason="enough"))
        yield None
        state.request_stop(run, Stop(reason="enough", now=True))
        yield None
        run.requests.write_text(run.requests.read_text() + '{"do": "stop", "origin": "x"}\nno\n')
        yield None
        yield HostLine(0, result_of(RunState.INTERRUPTED))
        yield HostLine(0, End(0))

    place = ScriptedPlace(run, [])
    place.follow = lambda since: ask()  # type: ignore[method-assign]
    followed(run, place)
    assert [(stop.reason, stop.now) for stop in place.stops] == [
        ("enough", False),
        ("enough", True),
        ("", False),
    ]


@pytest.mark.usefixtures("starts_processes")
def test_a_run_has_one_mirror(run: RunDir) -> None:
    """Two commands at once may both find that the run has no mirror."""
    ScriptedPlace(run, [], detached=True)
    lock = run.take_lock()
    assert lock is not None
    try:
        MirrorProcess(run, variables=None, stays=False).close()
    finally:
        lock.close()
    assert run.read_events() == []
