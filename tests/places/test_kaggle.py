"""Notebooks pushed to Kaggle: its own client, its stand-in, whose sessions run them for real."""

from __future__ import annotations

import json
import os
import signal
import threading

import nbformat
import pytest
from nbformat import v4

from tests.drivers.kaggle import KaggleProject
from tests.drivers.nodes import until
from tests.fakes.kaggle_kernels import Session
from tests.fakes.kaggle_server import Stored
from tpunb import cli
from tpunb.places import kaggle as kaggle_module

RUN = """\
import json, pathlib
run = pathlib.Path("runs/20260101-000000-nb")
run.mkdir(parents=True)
(run / "spec.json").write_text("{}")
"""
"""A cell that leaves the folder of a run that was cut off."""


def notebook(*sources: str, **metadata: object) -> None:
    cells = [v4.new_code_cell("n = 1", metadata={"tags": ["parameters"]})]
    cells += [v4.new_code_cell(source) for source in sources]
    made = v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(made, "My nb.ipynb")


def submit(*words: str) -> int:
    return cli.main(["submit", "My nb.ipynb", "--on", "kaggle", *words])


def session(project: KaggleProject) -> Session:
    [made] = project.service.sessions.values()
    return made


def asked(project: KaggleProject, method: str) -> dict[str, object]:
    [values] = [values for name, values in project.service.asked if name == method]
    return values


def test_notebook_is_pushed_waited_for_and_its_output_fetched(
    kaggle: KaggleProject, capsys: pytest.CaptureFixture[str]
) -> None:
    kaggle.set_place(session_hours=2.0)
    kaggle.service.files["datasets/me/digits"] = Stored(b"")
    lines = "%tpu_data kaggle://datasets/me/digits\n%tpu_data kaggle://competitions/nowhere --to x"
    skipped = f"if n < 0:\n    {lines.replace(chr(10), chr(10) + '    ')}"
    notebook(skipped, "open('answer.txt', 'w').write(str(n))", kaggle={"dockerImageVersionId": 1})
    assert submit("-p", "n", "42") == 0
    out = capsys.readouterr().out
    pushed = asked(kaggle, "SaveKernel")
    assert (pushed["machineShape"], pushed["sessionTimeoutSeconds"]) == ("TpuV5E8", 7200)
    assert (pushed["isPrivate"], pushed["enableInternet"]) == (True, True)
    assert pushed["datasetDataSources"] == ["me/digits"]
    assert pushed["competitionDataSources"] == ["nowhere"]
    made = nbformat.reads(str(pushed["text"]), as_version=4)
    assert made.metadata.keys() == {"kernelspec", "language_info"}
    assert made.cells[0].source == "%pip install --quiet tpunb"
    assert "n = 42" in made.cells[2].source
    assert "you may not read: nowhere. The session has started without them" in out
    assert out.index("QUEUED" if "QUEUED" in out else "RUNNING") < out.index("COMPLETE")
    [folder] = (kaggle.folder / "runs/kaggle").iterdir()
    assert (folder / "answer.txt").read_text() == "42"
    executed = nbformat.read(folder / f"{folder.name}.ipynb", as_version=4)
    assert executed.cells[2].execution_count == 3
    assert f"the session's output is in {folder}" in out


@pytest.mark.parametrize("install", ["!pip install -q git+https://x/tpunb", "%pip install tpunb"])
def test_notebook_that_installs_tpunb_is_pushed_as_it_is(
    kaggle: KaggleProject, install: str
) -> None:
    kaggle.service.hold.clear()
    notebook(install)
    assert submit("--detach") == 0
    made = nbformat.reads(session(kaggle).asked["text"], as_version=4)
    assert [cell.source for cell in made.cells] == ["n = 1", install]


@pytest.mark.parametrize(
    ("cell", "status", "said"),
    [
        ("1 / 0", "ERROR: Your notebook failed.", "with its log and the executed notebook"),
        (RUN, "COMPLETE", "run 20260101-000000-nb has no result: it was cut off"),
    ],
)
def test_failed_session_or_run_is_exit_status_1(
    kaggle: KaggleProject,
    capsys: pytest.CaptureFixture[str],
    cell: str,
    status: str,
    said: str,
) -> None:
    notebook(cell)
    assert submit() == 1
    out = capsys.readouterr().out
    assert status in out
    assert said in out


def test_interrupt_ends_the_wait_and_says_how_to_go_on(
    kaggle: KaggleProject, capsys: pytest.CaptureFixture[str]
) -> None:
    kaggle.service.hold.clear()
    notebook("print(1)")

    def interrupt() -> None:
        until(lambda: any(name == "GetKernelSessionStatus" for name, _ in kaggle.service.asked))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert submit() == 130
    out = capsys.readouterr().out
    ref = session(kaggle).ref
    assert f"on Kaggle: https://www.kaggle.com/code/{ref} (Cancel Run there ends it)" in out
    folder = kaggle.folder / "runs/kaggle" / ref.partition("/")[2]
    assert f"`kaggle kernels output {ref} -p {folder}`" in out
    assert "no longer waiting: the session continues" in out


def test_waiting_outlasts_trouble_of_kaggle(kaggle: KaggleProject) -> None:
    kaggle.service.trouble["GetKernelSessionStatus"] = [503, 429, 0]
    notebook("print(1)")
    assert submit() == 0


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"most_sessions": 0}, "Kaggle did not start the notebook: Maximum batch TPU session"),
        ({"login": "other"}, "Kaggle answers with HTTP 401: `kaggle auth login`"),
        (
            {"trouble": {"SaveKernel": [503]}},
            "HTTP 503. If the session has begun nevertheless: https",
        ),
    ],
)
def test_push_that_fails(
    kaggle: KaggleProject, capsys: pytest.CaptureFixture[str], fault: dict[str, object], told: str
) -> None:
    notebook("print(1)")
    for name, value in fault.items():
        setattr(kaggle.service, name, value)
    assert submit() == 1
    assert told in capsys.readouterr().err


def test_kaggle_that_no_longer_answers_is_given_up(
    kaggle: KaggleProject, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kaggle.service.hold.clear()
    monkeypatch.setattr(kaggle_module, "LOST", 0.0)
    kaggle.service.trouble["GetKernelSessionStatus"] = [503] * 9
    notebook("print(1)")
    assert submit() == 1
    out, err = capsys.readouterr()
    assert f"`kaggle kernels output {session(kaggle).ref} -p" in out
    assert "Kaggle answers with HTTP 503, for" in err


def test_dry_run_pushes_nothing(kaggle: KaggleProject, capsys: pytest.CaptureFixture[str]) -> None:
    notebook("print(1)")
    assert submit("--dry-run") == 0
    assert json.loads(capsys.readouterr().out)["machine_shape"] == "TpuV5E8"
    assert submit("--cell", "1") == 1
    assert not kaggle.service.sessions


def test_without_a_login(kaggle: KaggleProject, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KAGGLE_USERNAME", "KAGGLE_KEY"):
        monkeypatch.delenv(name)
    notebook("print(1)")
    assert submit() == 1
