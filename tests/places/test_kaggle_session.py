"""The code in a Kaggle session before and around `tpunb node`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tpunb.places import kaggle_session
from tpunb.places.kaggle_session import ENDING, FOLDER, ORDER, SCRIPT, bring
from tpunb.places.log_stream import Unpacker
from tpunb.runs.spec import RunSpec
from tpunb.runs.stream import End, encode


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The unpacked files of the notebook, with its working directory as the current one."""
    (tmp_path / "sent" / "run").mkdir(parents=True)
    (tmp_path / "sent" / "files").mkdir()
    (tmp_path / "working").mkdir()
    monkeypatch.chdir(tmp_path / "working")
    Path(SCRIPT).write_text("print(1)\n")
    return tmp_path / "sent"


def session(
    sent: Path, *, seconds: float = 3600, timeout: float | None = None, **variables: str
) -> kaggle_session._Session:
    spec = RunSpec("a-run", "train", 8, "TPU", ".", (), (), timeout=timeout)
    (sent / "run" / "spec.json").write_text(json.dumps(spec.to_json()))
    order = {"accelerator": "TpuV5E8", "seconds": seconds, "variables": variables}
    (sent / ORDER).write_text(json.dumps(order))
    return kaggle_session._Session(Path.cwd() / FOLDER, sent)


@pytest.mark.parametrize(
    ("seconds", "timeout", "limit"),
    [
        (36000.0, None, 36000.0 - ENDING),
        (36000.0, 60.0, 60.0),
        (600.0, None, 500.0),
        (600.0, 550.0, 500.0),
    ],
)
def test_timeout_of_the_run_is_below_that_of_the_session(
    sent: Path, seconds: float, timeout: float | None, limit: float
) -> None:
    (sent / "files" / "helper.py").write_text("X = 1\n")
    session(sent, seconds=seconds, timeout=timeout)._prepare()
    assert json.loads(Path(FOLDER, "spec.json").read_text())["timeout"] == limit
    assert sorted(os.listdir()) == ["helper.py", FOLDER]
    assert Path(FOLDER, SCRIPT).read_text() == "print(1)\n"


@pytest.mark.parametrize("folder", ["slug", "notebooks/slug", "notebooks/me/slug"])
def test_resume_from_checkpoints_of_an_earlier_run(
    sent: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = sent / "input"
    monkeypatch.setenv("KAGGLE_CACHE_MOUNT_FOLDER", str(inputs))
    made = session(sent, TPUNB_RESUME="kaggle-output:me/slug", A="b")
    with pytest.raises(RuntimeError, match=r"no checkpoints of me/slug"):
        made._variables()
    checkpoints = inputs / folder / FOLDER / "checkpoints"
    checkpoints.mkdir(parents=True)
    assert made._variables() == {"TPUNB_RESUME": str(checkpoints), "A": "b"}


@pytest.mark.usefixtures("starts_processes")
def test_data_that_is_missing_is_reported(sent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error is shown on the page, and sent to the mirror."""
    with pytest.raises(RuntimeError, match="the forms"):
        bring("kaggle://datasets/cats")
    printed = capsys.readouterr()
    assert "kaggle://datasets/cats does not have one of" in printed.out
    assert "address of its page" in printed.out
    [end] = Unpacker().feed(printed.err)
    assert isinstance(end, End)
    assert end.returncode == 2
    assert end.message.startswith("kaggle://datasets/cats does not have one of")


@pytest.mark.usefixtures("starts_processes")
def test_other_output_of_the_node_is_passed_on(
    sent: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"import sys; sys.stdout.write('a warning\\n' + {encode(End(3)).decode()!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as node:
        assert session(sent)._follow(node) == End(3)
    printed = capsys.readouterr()
    assert printed.out == "a warning\n"
    assert list(Unpacker().feed(printed.err)) == [End(3)]


@pytest.mark.usefixtures("starts_processes")
def test_kaggle_session_imports_only_the_standard_library() -> None:
    code = (
        "import sys\nfrom tpunb.places import kaggle_session, log_stream\n"
        "print(*{name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": kaggle_session.PACKAGE_ROOT},
    )
    assert set(done.stdout.split()) <= {"tpunb", "__main__"}, done.stdout + done.stderr
