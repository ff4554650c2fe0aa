"""A watcher, with the gcloud that is shipped for this: what it waits for, and that it stops."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from threading import Timer

import pytest

from tests.kernels import PATIENCE
from tests.platforms.test_tpu_vm import MINE
from tests.platforms.vms import PLACE, gcloud, path_with
from tpunb import rundir
from tpunb.models import RunResult, RunSpec, State
from tpunb.platforms import stopping, watch
from tpunb.platforms.fakes import FakeMachine
from tpunb.platforms.fakes.gcloud import FakeGcloud
from tpunb.platforms.stopping import Activity, Order
from tpunb.rundir import RunDir

SPEC = RunSpec("id", "n", 1, "TPU", "/", (), ())


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcloud]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    made = gcloud(tmp_path / "bin")
    monkeypatch.setenv("PATH", path_with(made))
    yield made
    stopping.take_back()
    for watcher in stopping._watchers:
        watcher.wait(PATIENCE)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    (tmp_path / "runs").mkdir()
    (tmp_path / "root").mkdir()
    return Order(
        MINE, (str(tmp_path / "runs"),), time.time(), countdown=0.6, look=0.02,
        root=str(tmp_path / "root"),
    )  # fmt: skip


def started(runs: Path, name: str = "a") -> RunDir:
    """A run that goes on, as far as its folder says."""
    run = RunDir(runs / f"20261121-120000-{name}")
    run.path.mkdir()
    rundir.write_json(run.spec, SPEC.to_json())
    later = time.time() + 600  # one that does not begin within a minute is called lost
    os.utime(run.path, (later, later))
    return run


def ended(run: RunDir, state: State = "succeeded", reason: str = "") -> None:
    now = time.time()
    run.write_result(RunResult(state, "n", 1, "TPU", now - 1, now, run.path, reason=reason))


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, stopping.status()
        time.sleep(0.01)


def hurried(order: Order) -> None:
    """Let an order that was given count down quickly from now on; the watcher goes on."""
    given = stopping.given()
    assert given is not None
    path = stopping.folder() / "order.json"
    rundir.write_json(path, asdict(replace(given, countdown=order.countdown)))


def why() -> str:
    status = stopping.status()
    return status.why if status is not None and status.phase == "waiting" else ""


def phase() -> str:
    status = stopping.status()
    return "" if status is None else status.phase


def stops(known: FakeGcloud) -> int:
    return sum(call[3] == "stop" for call in known.calls)


def test_after_the_run_and_not_before(known: FakeGcloud, order: Order) -> None:
    run, other = started(Path(order.runs[0])), started(Path(order.runs[0]), "b")
    stopping.give(replace(order, run=str(run.path), countdown=600.0))
    until(lambda: why().endswith("-a goes on"))
    ended(run, "failed")
    until(lambda: why().endswith("-b goes on"))  # in the background, or detached
    assert known.calls == []
    ended(other)
    until(lambda: phase() == "counting")
    hurried(order)
    until(lambda: phase() == "stopped")
    assert known.nodes[PLACE]["state"] == "STOPPING"
    assert stops(known) == 1
    until(lambda: stopping.given() is None)


def test_the_countdown_can_be_ended_by_anybody(known: FakeGcloud, order: Order) -> None:
    run = started(Path(order.runs[0]))
    ended(run)
    stopping.give(replace(order, run=str(run.path), countdown=600.0))
    until(lambda: phase() == "counting")
    status = stopping.status()
    assert status is not None
    assert status.left is not None
    assert 0 < status.left <= 600
    assert stopping.take_back()
    assert not stopping.take_back()
    for watcher in stopping._watchers:
        assert watcher.wait(PATIENCE) == 0
    assert known.calls == []


def test_who_stops_the_run_by_hand_is_here(known: FakeGcloud, order: Order) -> None:
    run = started(Path(order.runs[0]))
    ended(run, "interrupted", "interrupted in the notebook")
    stopping.give(replace(order, run=str(run.path)))
    until(lambda: phase() == "kept")
    until(lambda: stopping.given() is None)
    assert known.calls == []


def test_any_run_that_ends_later_will_do(known: FakeGcloud, order: Order) -> None:
    before = started(Path(order.runs[0]))
    ended(before)
    stopping.give(replace(order, since=time.time() + 0.01))
    until(lambda: why() == "no run has ended since")
    run = started(Path(order.runs[0]), "b")
    until(lambda: why().endswith("-b goes on"))
    ended(run)
    until(lambda: phase() == "stopped")


def test_a_cell_holds_it_up_and_the_time_begins_anew(known: FakeGcloud, order: Order) -> None:
    activity = Activity("a notebook")
    activity.say(True)
    stopping.give(replace(order, idle=0.1, countdown=600.0))
    until(lambda: why() == "a cell runs in a notebook")
    activity.say(False)
    until(lambda: phase() == "counting")
    activity.say(True)
    until(lambda: why() == "a cell runs in a notebook")
    assert stops(known) == 0
    hurried(order)
    activity.close()  # the kernel has ended
    until(lambda: phase() == "stopped")


def test_a_kernel_that_was_killed_does_not_hold_it_up(known: FakeGcloud, order: Order) -> None:
    code = (
        "import sys, time; from tpunb.platforms.stopping import Activity; a = Activity('x'); "
        "a.say(True); print('busy', flush=True); time.sleep(600)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == b"busy\n"
    stopping.give(replace(order, idle=0.1))
    until(lambda: why() == "a cell runs in x")
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    until(lambda: phase() == "stopped")


def test_whoever_has_the_tpu_holds_it_up(known: FakeGcloud, order: Order, tmp_path: Path) -> None:
    with FakeMachine(tmp_path / "machine").chips("v6e", 8) as machine:
        holder = machine.hold("vfio/3")
        stopping.give(replace(order, idle=0.1, root=str(machine.root)))
        until(lambda: f"process {holder.pid} of" in why() and why().endswith("has the TPU"))
        machine.let_go(holder)
        until(lambda: phase() == "stopped")


def test_google_cloud_refuses(known: FakeGcloud, order: Order) -> None:
    (known.folder / "denied").touch()
    stopping.give(replace(order, idle=0.1, countdown=0.1))
    until(lambda: phase() == "failed")
    status = stopping.status()
    assert status is not None
    assert "PERMISSION_DENIED" in status.why
    assert len(known.calls) == watch.TRIES
    assert stops(known) == 0
    assert "PERMISSION_DENIED" in (stopping.folder() / "watcher.log").read_text()


def test_a_machine_that_is_another_one_by_now_is_not_stopped(
    known: FakeGcloud, order: Order
) -> None:
    known.put(PLACE, networkEndpoints=[{"ipAddress": "10.0.0.99"}])
    stopping.give(replace(order, idle=0.1, countdown=0.1))
    until(lambda: phase() == "failed")
    assert stops(known) == 0


def test_what_begins_while_gcloud_starts_is_not_cut_off(
    known: FakeGcloud, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stopping.folder()
    rundir.write_json(place / "order.json", asdict(replace(order, idle=0.1)))
    given = stopping.given()
    assert given is not None
    monkeypatch.setattr(type(MINE), "check", lambda self: started(Path(order.runs[0])))
    assert watch._stop(place, given) is None
    monkeypatch.setattr(type(MINE), "check", lambda self: stopping.take_back())
    assert watch._stop(place, replace(given, runs=())) is None
    assert stops(known) == 0


def test_a_full_disk_does_not_keep_it_running(
    known: FakeGcloud, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = stopping.folder()
    rundir.write_json(place / "order.json", asdict(replace(order, idle=0.1)))

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rundir, "write_json", full)
    watch._watch(place)
    assert stops(known) == 1
    assert stopping.given() is None


def test_one_watcher_and_the_latest_order(known: FakeGcloud, order: Order) -> None:
    stopping.give(order)
    until(lambda: why() == "no run has ended since")
    stopping.give(replace(order, idle=0.1, since=time.time()))
    first, second = stopping._watchers[-2:]
    until(lambda: phase() == "stopped")
    assert first.wait(PATIENCE) == 0
    assert second.wait(PATIENCE) == 0
    assert stops(known) == 1


def test_an_order_right_after_one_was_taken_back_is_seen(known: FakeGcloud, order: Order) -> None:
    for _ in range(3):
        stopping.give(order)
        stopping.take_back()
    stopping.give(replace(order, idle=0.1))
    until(lambda: phase() == "stopped")
    assert stops(known) == 1


def test_nothing_is_there_before_somebody_asks(known: FakeGcloud) -> None:
    assert stopping.given() is None
    assert stopping.status() is None
    assert not stopping.take_back()
    assert not os.path.exists(os.environ["HOME"])
    assert stopping.folder().stat().st_mode & 0o077 == 0


def test_a_kernel_that_begins_while_the_watcher_looks(known: FakeGcloud) -> None:
    """It holds what a kernel has just made for what one has left, and removes it."""
    made = stopping.folder() / "kernels" / str(os.getpid())
    made.touch()
    with open(made) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        Timer(0.2, lambda: (made.unlink(), file.close())).start()
        activity = Activity("a new one")
    activity.say(True)
    assert stopping.kernels(stopping.folder())[os.getpid()]["busy"]
    activity.close()
