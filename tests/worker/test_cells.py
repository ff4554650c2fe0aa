"""Descriptions of exceptions in cells. (Everything else: tests/scenarios.)"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.support import script_of
from tpunb.runs.directory import RunDir
from tpunb.runs.spec import RunSpec
from tpunb.utils.errors import SetupError
from tpunb.worker import cells
from tpunb.worker.cells import (
    LONGEST_MESSAGE,
    MOST_LINES,
    Cells,
    describe_error,
    print_error,
    write_error,
)


def raised(train: str, folder: Path) -> tuple[BaseException, RunDir, RunSpec]:
    """The exception that a train cell raises."""
    script, run = script_of([], train), RunDir(folder)
    run.script.write_text(script.text)
    spec = RunSpec("id", "n", 1, "CPU", "/", (), script.blocks)
    made = Cells(run, spec)
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - of any kind
        made.execute(made.of("train")[0])
    return caught.value, run, spec


@pytest.mark.parametrize(
    ("train", "name"),
    [
        ("ä = 1\nb = [ä, ä, missing]", "missing"),
        ("def f(x):\n    return 1 + x / 0\nf(1)", "x / 0"),
        ("a = (1 +\n     )", ")"),
    ],
)
def test_failure_column_of_the_expression(train: str, name: str, tmp_path: Path) -> None:
    error, run, spec = raised(train, tmp_path)
    said = describe_error(error, run, spec)
    column = train.split("\n")[1].index(name)
    unknown = sys.version_info < (3, 11) and not isinstance(error, SyntaxError)
    assert (said["line"], said["column"]) == (2, None if unknown else column)


@pytest.mark.parametrize("text", ["'x' * 30_000_000", "'line\\n' * 3_000_000"])
def test_failure_message_and_traceback_are_cut_if_long(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error, run, spec = raised(f"raise ValueError('begin ' + {text} + ' end')", tmp_path)
    said = describe_error(error, run, spec)
    print_error(error, run, spec)
    for part in (said["message"], said["traceback"], capsys.readouterr().err):
        assert len(part) < LONGEST_MESSAGE + 500
        assert "begin " in part
        assert part.rstrip().endswith(" end")
        assert "left out …" in part
        assert part.count("\n") < MOST_LINES + 10


def test_traceback_of_circular_exception_causes(tmp_path: Path) -> None:
    circle = "a, b = ValueError('a'), KeyError('b')\na.__cause__, b.__cause__ = b, a\nraise a"
    said = describe_error(*raised(circle, tmp_path))
    assert said["traceback"].count("ValueError: a") == 1
    assert said["traceback"].count("direct cause of the following") == 1
    assert said["traceback"].index("KeyError") < said["traceback"].index("ValueError")


def test_traceback_of_a_long_exception_chain_is_cut(tmp_path: Path) -> None:
    chain = (
        "def go(depth):\n    try: go(depth - 1) if depth else 1 / 0\n"
        "    except Exception: raise ValueError(depth)\ngo(100)"
    )
    traceback = describe_error(*raised(chain, tmp_path))["traceback"]
    assert traceback.startswith("… earlier exceptions left out …")
    assert traceback.endswith("ValueError: 100\n")
    assert len(traceback) < 20_000


OWN = """
import contextlib

@contextlib.contextmanager
def waiting():
    try:
        receive()
    except ConnectionError as error:
        raise ValueError("rank 1 ended") from error
    yield

def receive():
    raise ConnectionError("reset by peer")

def barrier():
    with waiting():
        pass

def call(function):
    function()
"""


def test_tpunbs_own_frames_and_what_it_handled_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cells, "_OWN", str(tmp_path / "own_"))
    said = describe_error(*raised("import own_module\nown_module.barrier()", tmp_path))
    assert said["traceback"].splitlines() == [
        "Traceback (most recent call last):",
        "  cell [1], line 2, in <module>",
        "    own_module.barrier()",
        "ValueError: rank 1 ended",
    ]
    mine = "import own_module\ndef f():\n    try: 1 / 0\n    except ZeroDivisionError: {}[0]\n"
    shown = describe_error(*raised(f"{mine}own_module.call(f)", tmp_path))["traceback"]
    assert "ZeroDivisionError" in shown
    assert shown.count("in f") == 2


@pytest.mark.parametrize("hook", ["lambda *error: 1 / 0", "lambda *error: exit(0)", "None"])
def test_traceback_is_shown_despite_a_broken_excepthook(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    error, run, spec = raised(
        f"import sys\nsys.excepthook = {hook}\nraise KeyError('mine')", tmp_path
    )
    print_error(error, run, spec)
    said = capsys.readouterr().err
    assert said.startswith("Error in sys.excepthook:\n")
    assert said.endswith("KeyError: 'mine'\n")


def test_a_setup_error_outside_of_the_cells_is_the_headline(tmp_path: Path) -> None:
    inside, run, spec = raised(
        "from tpunb.errors import SetupError\nraise SetupError('no TPU')", tmp_path
    )
    run.error(0, 0).parent.mkdir(parents=True)
    for error, headline in (
        (inside, "rank 0 failed in cell [1], line 2: SetupError: no TPU"),
        (SetupError("no TPU"), "no TPU"),
    ):
        write_error(error, run, spec, 0, 0)
        failure = run.read_error(0, 0)
        assert failure is not None
        assert failure.headline() == headline
        run.error(0, 0).unlink()


def test_failure_time_ignores_a_patched_time_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the user's code replaces `time.time` (freezegun)."""
    error, run, spec = raised("1 / 0", tmp_path)
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert describe_error(error, run, spec)["time"] >= before
