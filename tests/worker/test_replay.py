from __future__ import annotations

import ast
import os
import traceback
from pathlib import Path
from textwrap import dedent

import pytest

from tpunb.worker import replay

ONCE = {
    "os.mkdir": "os.mkdir('made')",
    "os.makedirs": "os.makedirs('made')",
    "a path's mkdir": "Path('made').mkdir()",
    "a name of its own": "from os import mkdir as m, mkdir; mkdir('made')",
    "symlink": "os.symlink('here', 'made')",
    "remove": "os.remove('gone')",
    "unlink": "Path('gone').unlink()",
    "rmtree": "shutil.rmtree('gone')",
    "rename": "os.rename('gone', 'made')",
    "move": "shutil.move('gone', 'made')",
    "del": "del os.environ['GONE']",
    "del, two of which one is there": "del os.environ['GONE'], os.environ['THERE']",
    "pop": "os.environ.pop('GONE')",
    "in a loop": "for name in ['GONE', 'THERE']:\n    os.environ.pop(name)",
    "in a function": "def make():\n    os.mkdir('made')\nmake()",
    "in try, without a handler": "try:\n    os.mkdir('made')\nfinally:\n    pass",
    "in a handler": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    os.mkdir('made')",
}


@pytest.fixture(autouse=True)
def _done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that cells have left."""
    monkeypatch.chdir(tmp_path)
    Path("made").mkdir()
    monkeypatch.delenv("GONE", raising=False)
    monkeypatch.setenv("THERE", "1")


def execute(source: str, *, prelude: bool) -> dict[str, object]:
    names: dict[str, object] = {}
    source = f"import os, shutil\nfrom pathlib import Path\n{dedent(source)}\nend = True\n"
    assert replay.may_change(source)
    replay.begin_cell(prelude=prelude)
    exec(compile(replay.tolerate_repetition(ast.parse(source)), "cell", "exec"), names)
    return names


@pytest.mark.parametrize("source", ONCE.values(), ids=ONCE)
def test_replay_tolerates_what_the_kernel_has_done_before(source: str) -> None:
    assert execute(source, prelude=True)["end"]
    assert "THERE" not in os.environ or "THERE" not in source


@pytest.mark.parametrize("source", ONCE.values(), ids=ONCE)
def test_replay_raises_in_functions_called_by_the_train_cell(source: str) -> None:
    with pytest.raises((OSError, KeyError)) as raised:
        execute(source, prelude=False)
    shown = traceback.extract_tb(raised.value.__traceback__)
    assert any(frame.filename == "cell" for frame in shown)


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    os.mkdir('made')\n    new = True\nexcept FileExistsError:\n    new = False",
        """
        import contextlib
        new = False
        with contextlib.suppress(FileExistsError):
            os.mkdir('made')
            new = True
        """,
    ],
)
def test_replay_keeps_error_handling_of_the_cells(source: str) -> None:
    assert execute(source, prelude=True)["new"] is False


@pytest.mark.parametrize(
    "source",
    ["os.mkdir('no/folder')", "[].remove(1)", "v = os.environ.pop('GONE')", "os.environ['GONE']"],
)
def test_replay_raises_other_errors(source: str) -> None:
    with pytest.raises((OSError, ValueError, KeyError)):
        execute(source, prelude=True)


def test_replay_leaves_other_code_unchanged() -> None:
    source = "os.environ.pop('GONE', None)\nx = os.mkdir\ndel x\ndata.append(3)\n"
    tree = ast.parse(source)
    before = ast.dump(tree, include_attributes=True)
    assert ast.dump(replay.tolerate_repetition(tree), include_attributes=True) == before
