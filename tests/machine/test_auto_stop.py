"""`--stop-when-done`: which machines can be stopped, and what the watcher waits for."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kernel import PATIENCE
from tests.fakes.gcloud import FakeGcloud
from tests.fakes.machine import FakeMachine
from tests.machine.machines import machine
from tests.machine.vms import ADDRESS, PLACE, gcloud, path_with, tpu_vm
from tpunb.errors import SetupError
from tpunb.machine import auto_stop, metadata
from tpunb.machine.auto_stop import AutoStop, StopOrder, StopPhase, StopStatus, TpuVm
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState, Stop, StopCause, StopOrigin
from tpunb.utils import env_vars
from tpunb.utils.files import write_json

pytestmark = pytest.mark.usefixtures("starts_processes")

MINE = TpuVm("my-tpu", "us-central1-a", "my-project", "v6e-8", ADDRESS)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The stand-in for the metadata server shares this process and its processors."""
    monkeypatch.setattr(metadata, "PATIENCE", 30.0)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = gcloud(tmp_path / "bin")
    monkeypatch.setenv("PATH", path_with(known))
    with tpu_vm(tmp_path / "root") as made:
        vm = auto_stop.find_tpu_vm({**made.env, env_vars.ROOT: str(made.root)})
    assert vm == MINE
    vm.stop()
    assert known.nodes[PLACE]["state"] == "STOPPING"
    asked = ["my-tpu", "--zone=us-central1-a", "--project=my-project", "--quiet"]
    assert known.calls == [
        ["compute", "tpus", "tpu-vm", "describe", *asked, "--format=json"],
        ["compute", "tpus", "tpu-vm", "stop", *asked, "--async"],
    ]


@pytest.mark.parametrize(
    ("dump", "changed", "env", "words"),
    [
        ("v6e-8", {"NODE_ID": "0"}, {}, "`gcloud compute instances stop` stops it"),
        ("v6e-8", {"ACCELERATOR_TYPE": ""}, {}, "does not name it as a TPU VM"),
        ("v6e-8", {}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "a Kaggle session, which costs quota"),
        ("v6e-8", {}, {"COLAB_RELEASE_TAG": "x"}, r"a Colab runtime: .*runtime.unassign\(\)"),
        ("v6e-8", {}, {"KUBERNETES_SERVICE_HOST": "x"}, r"Google Cloud \(Kubernetes"),
        ("gce", {}, {}, r"is not recognised as a TPU VM of Google Cloud"),
        ("laptop", {}, {}, r"is not recognised as a TPU VM of Google Cloud"),
    ],
)
def test_none_to_be_stopped(
    dump: str, changed: dict[str, str], env: dict[str, str], words: str, tmp_path: Path
) -> None:
    there = tpu_vm(tmp_path, dump, **changed) if dump.startswith("v") else machine(dump, tmp_path)
    with there as made, pytest.raises(SetupError, match=words):
        auto_stop.find_tpu_vm({**made.env, **env, env_vars.ROOT: str(made.root)})


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (
            {"networkEndpoints": [{"ipAddress": "10.0.0.9"}]},
            "lists as my-tpu in us-central1-a is another machine",
        ),
        ({"acceleratorType": "v5p-8"}, "my-tpu in .* is another machine: v5p-8 at 10.128"),
        ({"networkEndpoints": [{"ipAddress": ADDRESS}, {"ipAddress": "x"}]}, "one of 2 hosts"),
        (
            {"schedulingConfig": {"spot": True}},
            r"a spot VM, .* tpu-vm delete my-tpu --zone=us-central1-a --project=my-p",
        ),
        ({"state": "PREEMPTED"}, "the state of my-tpu is PREEMPTED, not READY"),
    ],
)
def test_what_google_cloud_says_otherwise(
    node: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = gcloud(tmp_path, **node)
    monkeypatch.setenv("PATH", path_with(known))
    with pytest.raises(SetupError, match=words):
        MINE.check()
    assert [call[3] for call in known.calls] == ["describe"]


def test_gcloud_that_may_not_or_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = gcloud(tmp_path)
    monkeypatch.setenv("PATH", path_with(known))
    (tmp_path / "denied").touch()
    with pytest.raises(SetupError, match=r"PERMISSION_DENIED.* needs the role TPU Admin"):
        MINE.check()
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(SetupError, match="gcloud is not installed, or not on PATH"):
        MINE.stop()


def folder() -> Path:
    return Path(os.environ["HOME"]) / ".cache/tpunb/stop"


SPEC = RunSpec("id", "n", 1, "TPU", "/", (), ())


@dataclass
class Watched:
    """An order, a watcher with a clock of its own, and the machine."""

    gcloud: FakeGcloud
    order: StopOrder
    looks: Iterator[StopStatus] = field(default_factory=lambda: iter(()))
    now: float = 1000.0

    def give(self, **changed: Any) -> None:
        """Write an order without starting a watcher process."""
        self.order = replace(self.order, **changed)
        (folder() / "kernels").mkdir(parents=True)
        write_json(folder() / "order.json", asdict(self.order))
        self.looks = auto_stop.watch(self.order, lambda: self.now)

    def after(self, seconds: float) -> tuple[StopPhase, str]:
        """Phase and reason of the watcher after some time."""
        self.now += seconds
        status = next(self.looks)
        return status.phase, status.reason

    def run(self, name: str = "a") -> RunDir:
        """A run that is running according to its folder."""
        run = RunDir(Path(self.order.runs) / f"20261121-120000-{name}")
        run.path.mkdir()
        run.write_spec(SPEC)
        later = time.time() + 50  # a run that does not begin within a minute counts as lost
        os.utime(run.path, (later, later))
        return run

    @property
    def stops(self) -> int:
        """Number of calls of gcloud that stop the machine."""
        return sum(call[3] == "stop" for call in self.gcloud.calls)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    known = gcloud(tmp_path / "bin")
    monkeypatch.setenv("PATH", path_with(known))
    (tmp_path / "runs").mkdir()
    (tmp_path / "root").mkdir()
    monkeypatch.setenv(env_vars.ROOT, str(tmp_path / "root"))
    yield Watched(known, StopOrder(MINE, str(tmp_path / "runs"), time.time()))
    auto_stop.keep_running()


def end(run: RunDir, state: RunState = RunState.SUCCEEDED, stop: Stop | None = None) -> None:
    now = time.time()
    run.write_result(RunResult(state, "n", 1, "TPU", now - 1, now, run.path, stop=stop))


WAITING, COUNTING, STOPPED = StopPhase.WAITING, StopPhase.COUNTING, StopPhase.STOPPED


def test_after_the_run_and_not_before(watched: Watched) -> None:
    run, other = watched.run(), watched.run("b")
    watched.give(run=str(run.path))
    assert watched.after(0) == (WAITING, f"run {run.id} is active")
    end(run, RunState.FAILED)
    assert watched.after(600) == (WAITING, f"run {other.id} is active")  # detached, for example
    end(other)
    assert watched.after(0)[0] is COUNTING
    watched.now += 59
    assert next(watched.looks) == StopStatus(COUNTING, seconds_left=1.0)
    assert watched.gcloud.calls == []
    assert watched.after(1)[0] is STOPPED
    assert watched.gcloud.nodes[PLACE]["state"] == "STOPPING"
    assert watched.stops == 1
    assert next(watched.looks, None) is None


@pytest.mark.parametrize("origin", StopOrigin)
def test_who_stops_the_run_by_hand_decides(watched: Watched, origin: StopOrigin) -> None:
    run = watched.run()
    end(run, RunState.INTERRUPTED, Stop(StopCause.USER, origin=origin))
    watched.give(run=str(run.path))
    assert watched.after(600)[0] is StopPhase.KEPT
    assert next(watched.looks, None) is None
    assert watched.gcloud.calls == []


def test_any_run_that_ends_later_will_do(watched: Watched) -> None:
    end(watched.run())
    watched.give(since=time.time() + 0.01)
    assert watched.after(600) == (WAITING, "no run has ended since the order")
    run = watched.run("b")
    assert watched.after(600) == (WAITING, f"run {run.id} is active")
    time.sleep(0.02)
    end(run)
    watched.after(0)
    assert watched.after(60)[0] is STOPPED


def test_idle_counts_from_the_last_use(watched: Watched) -> None:
    watched.give(idle=1800.0)
    kernel = AutoStop()
    kernel.begin_cell()
    cell = f"a cell runs in a notebook (process {os.getpid()})"
    assert watched.after(5000) == (WAITING, cell)
    kernel.end_cell()
    watched.after(0)
    assert watched.after(1799)[0] is COUNTING
    kernel.begin_cell()
    assert watched.after(10) == (WAITING, cell)
    kernel.end_cell()
    watched.after(0)
    assert watched.after(1799)[0] is COUNTING
    kernel.close()
    assert watched.after(1)[0] is STOPPED


def test_a_kernel_that_was_killed_does_not_hold_it_up(watched: Watched) -> None:
    code = (
        "import time; from tpunb.machine.auto_stop import AutoStop; a = AutoStop(); "
        "a.begin_cell(); print('busy', flush=True); time.sleep(600)"
    )
    watched.give(idle=60.0)
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == b"busy\n"
    assert watched.after(0) == (WAITING, f"a cell runs in a notebook (process {kernel.pid})")
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    assert watched.after(59)[0] is COUNTING
    assert not list((folder() / "kernels").iterdir())


def test_whoever_has_the_tpu_holds_it_up(
    watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeMachine(tmp_path / "machine").chips("v6e", 8) as fake:
        user = fake.hold("vfio/3")
        monkeypatch.setenv(env_vars.ROOT, str(fake.root))
        watched.give(idle=60.0)
        phase, reason = watched.after(600)
        assert phase is WAITING
        assert f"process {user.pid} of" in reason
        assert reason.endswith("has the TPU")
        fake.release_lifelines(user)
        assert watched.after(1)[0] is COUNTING


def test_google_cloud_refuses(watched: Watched) -> None:
    (watched.gcloud.folder / "denied").touch()
    watched.give(idle=60.0)
    watched.after(0)
    # gcloud is tried again after another countdown
    assert [watched.after(60)[0] for _ in range(2)] == [COUNTING, COUNTING]
    phase, reason = watched.after(60)
    assert phase is StopPhase.FAILED
    assert "PERMISSION_DENIED" in reason
    assert len(watched.gcloud.calls) == auto_stop.TRIES
    assert watched.stops == 0
    assert next(watched.looks, None) is None


@pytest.mark.parametrize("event", ["a run begins", "the order is cancelled"])
def test_what_happens_while_gcloud_starts_counts(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    begins = event == "a run begins"
    monkeypatch.setattr(
        TpuVm, "check", lambda vm: watched.run() if begins else auto_stop.keep_running()
    )
    watched.give(idle=60.0)
    watched.after(0)
    watched.now += 60
    status = next(watched.looks, None)
    assert status.phase is WAITING if begins else status is None  # type: ignore[union-attr]
    assert watched.stops == 0


def test_a_full_disk_does_not_keep_it_running(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    watched.give(idle=0.1, countdown=0.1)
    monkeypatch.setattr(auto_stop, "write_json", full)
    auto_stop.carry_out(watched.order)
    assert watched.stops == 1
    assert auto_stop.read_order() is None


def test_each_order_has_a_process_and_the_newest_counts(watched: Watched) -> None:
    first = auto_stop.order_stop(watched.order)
    newest = replace(watched.order, idle=0.1, countdown=0.1, since=time.time())
    second = auto_stop.order_stop(newest)
    assert (first.wait(PATIENCE), second.wait(PATIENCE)) == (0, 0)
    assert watched.stops == 1
    assert auto_stop.read_status() == StopStatus(STOPPED)
    assert auto_stop.read_order() is None
    assert (folder() / "watcher.log").read_text().endswith("my-tpu stopped \n")
    assert folder().stat().st_mode & 0o077 == 0


def test_the_cell_shows_what_comes_of_it(watched: Watched) -> None:
    lines: queue.Queue[str] = queue.Queue()
    kernel = AutoStop()
    kernel.order(watched.order, lines.put, live=False)
    assert "will be stopped; waiting: this cell runs. Keep it: %tpu_setup" in lines.get()
    assert auto_stop.keep_running() == "this machine is kept running"
    assert lines.get(timeout=PATIENCE) == "TPU VM my-tpu is kept running"
    kernel.close()


def test_nothing_is_there_before_somebody_asks() -> None:
    AutoStop().begin_cell()
    assert auto_stop.keep_running() == "no shutdown is scheduled"
    assert auto_stop.read_status() is None
    assert not os.path.exists(os.environ["HOME"])
