"""Train cells from their options to their results, with a fake launcher."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionInfo, InteractiveShell

import tpunb
from tests.kernel.test_pipeline import SMALL, notebook
from tpunb.errors import RankFailedError, TpunbError
from tpunb.kernel import device, magics, options, pipeline, runs, session
from tpunb.kernel.launcher import Attached, Run
from tpunb.kernel.pipeline import RunRequest
from tpunb.kernel.session import Session
from tpunb.runs import last_run, listing
from tpunb.runs.directory import RunDir
from tpunb.runs.result import RunResult
from tpunb.runs.spec import RunSpec, RunState, Stop


class FakeRun(Run):
    """A fake run with a given result; its events are functions to be called."""

    def __init__(self, folder: RunDir, spec: RunSpec, launcher: FakeLauncher) -> None:
        self.dir, self.spec, self.launcher = folder, spec, launcher
        self.stops: list[Stop] = []

    def events(self) -> Iterator[None]:
        for happens in self.launcher.happens:
            happens()
            yield None

    def stop(self, stop: Stop) -> None:
        self.stops.append(stop)

    def result(self) -> RunResult:
        state, spec = self.launcher.state, self.spec
        return RunResult(state, spec.name, spec.world_size, spec.device, 1.0, 2.0, self.dir.path)


class FakeLauncher:
    """A fake launcher that records the orders."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.happens: list[Callable[[], object]] = []
        self.state = RunState.SUCCEEDED
        self.run: FakeRun | None = None
        self.is_warm = False

    def warm(self, env: Mapping[str, str]) -> None:
        self.calls.append("warm")

    def retire(self) -> None:
        self.calls.append("retire")

    def begin(
        self, request: RunRequest, folder: RunDir, spec: RunSpec, *args: object
    ) -> FakeRun | Attached:
        self.calls.append("start")
        folder.write_spec(spec)
        if request.options.detach:
            return Attached(folder)
        self.run = FakeRun(folder, spec, self)
        return self.run

    def run_ahead(self, *args: object) -> None:
        self.calls.append("ahead")

    def remember(self, *args: object) -> None:
        self.calls.append("remember")

    def close(self) -> None:
        pass


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Session]:
    """A session in a shell without a front end, whose notebook is one cell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PJRT_DEVICE", "")  # so that what a test sets is undone, too
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setattr(device, "choose_device", lambda wanted, set_by_user: None)
    monkeypatch.setattr(last_run, "result", None)
    monkeypatch.setattr(runs, "Launcher", FakeLauncher)
    monkeypatch.setattr(pipeline, "prepare_notebook", lambda *args, **kwargs: notebook(SMALL))
    monkeypatch.setattr(runs.panel, "show_run", lambda run, view: (None for _ in run.events()))
    with closing(Session(InteractiveShell())) as made:
        yield made


def train(kernel: Session, line: str = "") -> Any:
    return kernel.train(options.TRAIN.parse_line(line, {}), "pass")


def calls(kernel: Session) -> list[str]:
    assert isinstance(kernel.runs.launcher, FakeLauncher)
    return kernel.runs.launcher.calls


def test_train_prepares_starts_follows_and_binds_the_result(kernel: Session) -> None:
    result = train(kernel, "--cores 2 --name mine --out run")
    assert calls(kernel) == ["warm", "start", "remember"]
    assert (result.state, result.name, result.world_size) == (RunState.SUCCEEDED, "mine", 2)
    assert kernel.shell.user_ns["run"] is result is tpunb.last_run
    assert (result.dir.parent, result.dir.name.endswith("-mine")) == (kernel.defaults.runs, True)


def test_short_cells_are_run_ahead_with_the_last_of_them(
    kernel: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, clock = kernel.prepare, [1000.0]

    def slow(*args: Any) -> RunRequest:
        clock[0] += 0.1  # a large notebook
        return prepare(*args)

    monkeypatch.setattr(kernel, "prepare", slow)
    times = SimpleNamespace(time=time.time, monotonic=lambda: clock[0])
    monkeypatch.setattr(session, "time", times)
    monkeypatch.setattr(kernel.runs.launcher, "is_warm", True)
    monkeypatch.setattr(kernel, "_ahead", True)
    ahead = []
    for seconds in (0.0, 0.02, 0.4, 0.2, 0.02, 20.0):
        clock[0] += seconds
        kernel.shell.run_cell("pass", store_history=True)
        ahead.append(calls(kernel).count("ahead"))
    assert ahead == [1, 1, 1, 2, 2, 3], "half of a second is left between two"


def test_a_rehearsal_stays_one_whatever_a_cell_asks_for(
    kernel: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started_with = tmp_path / "environ"
    started_with.write_bytes(b"PATH=/bin\0")
    monkeypatch.setattr(device, "_ENVIRON", started_with)
    os.environ["PJRT_DEVICE"] = "TPU"
    request = kernel.prepare(options.TRAIN.parse_line("", {}), "pass")
    assert request.env["PJRT_DEVICE"] == "CPU"
    assert "PJRT_DEVICE=TPU is ignored: " in str(request.notes(request.spec("id")))
    started_with.write_bytes(b"PJRT_DEVICE=TPU\0")
    with pytest.raises(UsageError, match="0 chips"):
        train(kernel, "--cores 4")
    request = kernel.prepare(options.TRAIN.parse_line("--env PJRT_DEVICE=CPU", {}), "pass")
    assert (request.machine.device, request.env["PJRT_DEVICE"]) == ("CPU", "CPU")
    started_with.write_bytes(b"")
    with pytest.raises(UsageError, match="--env PJRT_DEVICE=TPU: there is no TPU"):
        train(kernel, "--cores 4 --env PJRT_DEVICE=TPU")


def test_a_cold_run_first_ends_the_preloaded_process(kernel: Session) -> None:
    train(kernel, "--cold")
    assert calls(kernel)[:2] == ["retire", "warm"]


def test_a_detached_run_prints_how_to_attach(
    kernel: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(kernel, "--detach --name far") is None
    assert calls(kernel) == ["warm", "start"]
    text = capsys.readouterr().out
    [run] = kernel.defaults.runs.iterdir()
    for line in (f"%tpu_attach {run.name}", f"%tpu_stop {run.name}", f"tpunb stop {run.name}"):
        assert line in text


def test_a_run_that_failed_raises_unless_told_not_to(kernel: Session) -> None:
    kernel.runs.launcher.state = RunState.FAILED  # type: ignore[attr-defined]
    with pytest.raises(RankFailedError):
        train(kernel)
    assert train(kernel, "--no-raise").state is RunState.FAILED


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--cores 9999", "%%tpu_train --cores: 9999 cores: at most "),
        ("--ranks 0,7", "%%tpu_train --ranks: there is no rank 7"),
        ("--detach --out run", "%%tpu_train --out: a detached run has no result yet"),
        ("--idle 5m", "%%tpu_train --idle needs --stop-when-done"),
        ("--env CPU_NUM_DEVICES=2", "%%tpu_train --env CPU_NUM_DEVICES=2: "),
    ],
)
def test_train_options_that_are_refused_before_anything_starts(
    kernel: Session, line: str, words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        train(kernel, line)
    assert str(refused.value).startswith(words)
    assert calls(kernel) == []


def test_returns_of_names_that_nothing_assigns_are_refused(kernel: Session) -> None:
    with pytest.raises(UsageError, match=r"^%%tpu_train --returns nothing: neither"):
        train(kernel, "--returns nothing")
    assert calls(kernel) == ["warm"]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_the_run_begins(
    kernel: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*args: object, **kwargs: object) -> pipeline.PreparedNotebook:
        interrupt()
        return notebook(SMALL)

    monkeypatch.setattr(pipeline, "prepare_notebook", prepare)
    with pytest.raises(TpunbError, match="interrupted before the run began: nothing was started"):
        train(kernel)
    assert calls(kernel) == ["warm"]


def test_a_first_interrupt_stops_the_run_and_a_second_hurries(kernel: Session) -> None:
    assert isinstance(kernel.runs.launcher, FakeLauncher)

    def twice() -> None:  # before the first press can have any visible effect
        interrupt()
        interrupt()

    nothing = lambda: None  # noqa: E731
    kernel.runs.launcher.happens = [nothing, twice, nothing, interrupt]
    train(kernel)
    assert kernel.runs.launcher.run is not None
    stop = session.INTERRUPTED
    assert kernel.runs.launcher.run.stops == [stop, replace(stop, now=True)]


def test_an_interrupt_while_a_run_begins_stops_it_and_keeps_its_folder(
    kernel: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has begun, and would otherwise have no folder to write to."""
    begin = FakeLauncher.begin

    def interrupted(self: FakeLauncher, *given: Any) -> FakeRun | Attached:
        interrupt()
        return begin(self, *given)

    monkeypatch.setattr(FakeLauncher, "begin", interrupted)
    assert isinstance(kernel.runs.launcher, FakeLauncher)
    kernel.runs.launcher.happens = [lambda: None]
    result = train(kernel)
    assert kernel.runs.launcher.run is not None
    assert kernel.runs.launcher.run.stops == [session.INTERRUPTED]
    assert result.dir.is_dir()


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("# note\n%%tpu_train\n1", "%%tpu_train must be the first line of its cell, above comm"),
        ("x = 1\n%%tpu_debug --nan\nx", "%%tpu_debug must be the first line of its cell, above "),
        ("%tpu_status", "%tpu_runs lists runs, and %tpu_attach shows one. All magics: %tpu_setup,"),
        ("%%tpu_train --cores 9999\nx", ""),
    ],
)
def test_a_magic_that_does_not_exist_there(
    kernel: Session, cell: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    magics.load_ipython_extension(shell := InteractiveShell())
    assert not shell.run_cell(cell).success
    magics.unload_ipython_extension(shell)
    error, *below = capsys.readouterr().err.splitlines()
    assert error.startswith("UsageError: ")
    assert [line[: len(said)] for line in below] == [said] * bool(said)


@pytest.mark.parametrize(("above", "told"), [("%%time", True), ("%%tpu_train", False)])
def test_a_cell_that_starts_processes_itself_is_told_of_the_magic(
    above: str, told: bool, kernel: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = f"{above}\nfrom accelerate import notebook_launcher\nnotebook_launcher(f, (), 2)"
    info = ExecutionInfo(cell, True, False, True, None)
    kernel.shell.events.trigger("pre_run_cell", info)
    said = "notebook_launcher often hangs or fails in the kernel: with %%tpu_train above it, "
    assert capsys.readouterr().out.startswith(said) is told


class TestCores:
    def test_cores_of_the_cell_of_setup_and_of_the_machine(self, kernel: Session) -> None:
        default = kernel.machine().default_cores
        assert train(kernel).world_size == default
        kernel.setup(options.SETUP.parse_line("--cores 3 --no-warm --json", {}))
        assert train(kernel).world_size == 3
        assert train(kernel, "--cores 1").world_size == 1
        assert train(kernel, "--cores all").world_size == default

    def test_cores_of_tpunb_run_override_the_cell(
        self, kernel: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TPUNB_CORES", "2")
        assert train(kernel, "--cores 1").world_size == 2
        monkeypatch.setenv("TPUNB_CORES", "all")
        assert train(kernel, "--cores 1").world_size == kernel.machine().default_cores


def test_setup_preloads_unless_told_not_to(
    kernel: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "preload", lambda: None)
    monkeypatch.setattr(listing, "_chosen", None)  # the choice holds for the whole process
    kernel.setup(options.SETUP.parse_line("--no-warm --runs other --json", {}))
    assert calls(kernel) == []
    assert kernel.defaults.runs == Path("other").absolute()
    assert json.loads(capsys.readouterr().out)["runs"] == str(Path("other").absolute())
    kernel.setup(options.SETUP.parse_line("--json", {}))
    assert calls(kernel) == ["warm"]


def test_preloading_needs_no_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    session.preload()


def test_setup_refuses_a_tpu_that_is_not_there(kernel: Session) -> None:
    with pytest.raises(UsageError, match="%tpu_setup --kernel tpu: this machine has no TPU"):
        kernel.setup(options.SETUP.parse_line("--kernel tpu", {}))
    assert calls(kernel) == []


def test_working_directory_removed_before_a_run_is_an_error(
    kernel: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(TpunbError, match=r"working directory .* was deleted.*%cd"):
        train(kernel)
    monkeypatch.chdir(tmp_path)
    assert train(kernel).state == "succeeded"


def test_a_note_is_told_once(
    kernel: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, told in ((None, 1), (None, 0), ("there.ipynb", 1)):
        snapshot = replace(SMALL, path=path, notes=(f"a note on {path}",))
        monkeypatch.setattr(pipeline, "prepare_notebook", lambda *_, s=snapshot, **__: notebook(s))
        train(kernel)
        assert capsys.readouterr().out.count(f"a note on {path}\n") == told
