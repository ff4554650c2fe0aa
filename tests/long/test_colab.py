"""More of tests/places/test_colab.py, which takes longer."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.drivers.colab import ColabProject
from tests.drivers.kernel import until
from tests.fakes.colab import TOKEN
from tests.places.test_colab import (
    BEGUN,
    GO_ON,
    SAVE,
    _processes,
    _project,
    _uploads,
    begun,
    last,
    project,
    result_of,
    runs,
    submit,
)
from tpunb.runs import state
from tpunb.runs.directory import RunDir, list_runs
from tpunb.runs.spec import FailureKind, RunState


def test_submit_runs_in_a_colab_session_and_releases_it(project: ColabProject) -> None:
    (project.project / "helper.py").write_text("WORD = 'helped'")
    project.set_place(files=["helper.py"])
    look = "print(helper.WORD, os.environ['SESAME'], os.path.basename(os.getcwd()))"
    project.notebook(f"{SAVE}import helper\n{look}", "--env SESAME=sesame-7")
    done = project.tpunb("submit", "nb.ipynb", "--on", "colab")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "83.20 compute units are left" in done.stdout
    assert "cpu of Colab: 0.08 compute units an hour" in done.stdout
    result = last(project)
    assert (result.state, result.hosts, result.place) == (RunState.SUCCEEDED, ("colab",), "colab")
    assert result.price is not None
    assert (result.price.per_hour, result.price.unit) == (0.08, "compute units")
    run = RunDir(result.dir)
    assert "helped sesame-7 content" in run.log.read_text()
    assert (run.checkpoints / "last").read_text() == "saved"
    fetched = project.tpunb("fetch", run.id)
    assert "was released: its run's files were fetched at the end of" in fetched.stderr


def test_credentials_and_secrets_are_in_no_file_or_log(project: ColabProject) -> None:
    project.notebook("print('hello')", "--env SESAME=sesame-7")
    project.colab.fail(stop=503)
    done = project.tpunb("submit", "nb.ipynb", "--on", "colab")
    run = list_runs(project.project / "runs")[-1]
    written = "".join(
        path.read_text(errors="replace") for path in run.path.rglob("*") if path.is_file()
    )
    said = done.stdout + done.stderr
    assert re.search("not be released .* may still cost money", said)
    assert f"`colab stop -s tpunb-{run.id}`" in said
    for secret in (TOKEN, "ya29", "runtime-proxy-token"):
        assert secret not in written + said
    assert not any("sesame-7" in word for words in project.colab.calls for word in words)
    content = project.colab.content(f"tpunb-{run.id}")
    assert not list(content.rglob("start.json"))
    assert not list(content.glob("*.tar"))
    project.colab.close()


def test_lost_connection_is_followed_again_and_stop_works(
    project: ColabProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "for n in range(5):\n    print('line', n, flush=True)\n"
    project.notebook(f"{lines}{GO_ON}")
    known = runs(project)
    process = submit(project)
    run = begun(project, known)
    (following,) = _processes(b"exec", f"tpunb-{run.id}".encode())
    os.kill(following, signal.SIGINT)
    until(lambda: project.colab.calls[-1][0] == "exec" and _uploads(project) == 2, "another turn")
    process.send_signal(signal.SIGINT)
    assert process.wait(240) == 1
    assert process.stdout is not None
    process.stdout.close()
    result = result_of(run)
    assert result.state is RunState.INTERRUPTED
    assert "interrupted in the terminal" in result.reason
    for number in range(5):
        assert run.log.read_text().count(f"line {number}\n") >= 1
    once = [line for line in run.log.read_text().splitlines() if line.endswith("line 3")]
    assert len(once) == len(set(once)), once


def test_lost_colab_session_is_named(project: ColabProject) -> None:
    project.notebook(GO_ON)
    known = runs(project)
    process = submit(project)
    run = begun(project, known)
    project.colab.fail(exec="cut")
    project.colab.lose(f"tpunb-{run.id}")
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    result = result_of(run)
    assert result.state is RunState.FAILED
    (failure,) = result.failures
    assert (failure.kind, failure.host) == (FailureKind.HOST_LOST, "colab")
    assert "Colab has ended the session" in said


def test_detached_run_is_attached_again(project: ColabProject) -> None:
    """The mirror is killed, and the run ends before another mirror follows it."""
    project.notebook(f"{SAVE}{BEGUN}while not os.path.exists('go'):\n    time.sleep(0.1)")
    done = project.tpunb("submit", "nb.ipynb", "--on", "colab", "--detach")
    assert done.returncode == 0, done.stdout + done.stderr
    run = until(lambda: list_runs(project.project / "runs")[-1], "a run")
    until(lambda: run.log.exists() and "begun" in run.log.read_text(), "ranks that have begun")
    fetched = project.tpunb(
        "fetch", run.id, "--files", "checkpoints"
    )  # while another process follows
    assert fetched.returncode == 0, fetched.stderr
    assert (run.checkpoints / "last").read_text() == "saved"
    (mirror,) = _processes(str(run.path).encode(), b"stays")
    os.kill(mirror, signal.SIGKILL)
    until(lambda: not run.is_running(), "the mirror's end")
    assert state.read_result(run) is None
    (project.colab.content(f"tpunb-{run.id}") / "go").touch()
    attached = project.tpunb("attach", run.id)
    assert attached.returncode == 0, attached.stdout + attached.stderr
    assert result_of(run).state is RunState.SUCCEEDED
    project.wait_until_released()


def test_kernel_death_ends_the_run_and_releases_the_session(project: ColabProject) -> None:
    project.notebook(GO_ON)
    known = runs(project)
    process = submit(project)
    run = begun(project, known)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    result = result_of(run)
    assert (result.state, result.reason) == (RunState.INTERRUPTED, "the kernel has ended")
    project.wait_until_released()
    until(lambda: not run.is_running(), "the mirror's end")


def test_interrupt_during_the_start_releases_the_session(project: ColabProject) -> None:
    project.notebook("print('never')")
    project.colab.fail(new=2)
    asked = len(project.colab.calls)
    process = submit(project)
    until(lambda: [w[0] for w in project.colab.calls[asked:]][-1:] == ["new"], "an allocation")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode == 1
    assert last(project).state is RunState.INTERRUPTED
    assert [words[0] for words in project.colab.calls[asked:]].count("stop") == 1
