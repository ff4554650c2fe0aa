"""`%run`: other notebooks and Python files in the middle of a notebook, as IPython runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.notebook.convert.notebooks import lines_of, notebook, run
from tests.notebook.convert.shell import Shell
from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import Omission, Script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, *sources: str, tags: tuple[str, ...] = ()) -> None:
    cells = [v4.new_markdown_cell("text"), *map(v4.new_code_cell, sources)]
    cells[-1].metadata.tags = list(tags)
    nbformat.write(v4.new_notebook(cells=cells), path)


def both(source: str, folder: Path, ipython: Shell) -> str:
    """What a cell and its script write, which is the same."""
    script = convert(notebook(source, train=None))
    done = run(script, folder)
    assert done.returncode == 0, done.stderr
    assert len(lines_of(script, 0)) == len(source.split("\n"))
    told, _ = ipython.run(folder, source)
    timed = ("IPython CPU timings", "  User", "  System", "Wall time")  # of %run -t
    own = [line for line in told.splitlines() if line.strip() and not line.startswith(timed)]
    assert done.stdout.splitlines() == own
    return done.stdout


def test_a_notebook_runs_in_the_names_of_this_one(folder: Path, ipython: Shell) -> None:
    write(folder / "other.ipynb", "y = x + 1", "%matplotlib inline\ndef f():\n    return x * 10")
    (folder / "other.ipynb").write_text(
        (folder / "other.ipynb").read_text(encoding="utf-8").replace("%matplotlib inline", "# ä"),
        encoding="utf-8",
    )
    assert both("x = 1\n%run other.ipynb\nx = 2\nprint(y, f())", folder, ipython) == "2 20\n"
    assert both(
        "x = 1\nfor i in range(2):\n    %run other.ipynb\n    x += y\nprint(x)", folder, ipython
    )


@pytest.mark.usefixtures("starts_processes")
def test_what_of_a_notebook_does_not_run_is_said(folder: Path) -> None:
    write(folder / "other.ipynb", "!ls\ndisplay('shown')", "# tpu: skip\nx = 1", "y = 1")
    script = convert(notebook("a = 1\n%run other.ipynb", "%%tpu_train\nprint(y)"))
    assert script.omissions == (
        Omission(
            1,
            2,
            "other.ipynb, code cell 1, line 1: !ls",
            "shell commands run once, in the notebook",
        ),
    )
    done = run(script, folder)
    assert (done.stdout, done.stderr) == ("shown\n1\n", "")


@pytest.mark.usefixtures("starts_processes")
def test_cells_tagged_to_be_skipped_are_not_run(folder: Path) -> None:
    write(folder / "other.ipynb", "y = 1", "y = 2", tags=("tpu-skip",))
    assert run(convert(notebook("%run other.ipynb\nprint(y)")), folder).stdout == "1\n"


@pytest.mark.usefixtures("starts_processes")
def test_a_line_separator_in_a_string_ends_no_line(folder: Path) -> None:
    write(folder / "other.ipynb", "# \x0c\x1c\nx = 'a\u2028b'\ny = 1 / 0")
    source = "import traceback\ntry:\n    %run other.ipynb\nexcept ZeroDivisionError:\n"
    done = run(convert(notebook(source + "    print(traceback.format_exc())")), folder)
    assert "line 3, in <module>\n    y = 1 / 0\n" in done.stdout


@pytest.mark.usefixtures("starts_processes")
def test_a_failure_names_the_cell_of_the_other_notebook(folder: Path) -> None:
    write(folder / "other.ipynb", "x = 1", "def f():\n    return 1 / 0")
    source = "import traceback\n%run other.ipynb\ntry:\n    f()\nexcept ZeroDivisionError:\n"
    done = run(convert(notebook(source + "    print(traceback.format_exc())")), folder)
    assert 'File "other.ipynb, code cell 2", line 2, in f\n    return 1 / 0\n' in done.stdout


def test_notebooks_that_run_others(folder: Path, ipython: Shell) -> None:
    write(folder / "a.ipynb", "%run b.ipynb", "z = y + 1")
    write(folder / "b.ipynb", "%run c", "y = c + 1")
    (folder / "c.py").write_text("c = 1", encoding="utf-8")
    assert both("%run a.ipynb\nprint(z)", folder, ipython) == "3\n"


@pytest.mark.usefixtures("starts_processes")
def test_an_ipython_file(folder: Path) -> None:
    (folder / "other.ipy").write_text("%time x = 1\ny = !echo a\n", encoding="utf-8")
    script = convert(notebook("%run other.ipy\nprint(x, y.n)", train=None))
    assert run(script, folder).stdout == "1 a\n"


PYTHON = """\
import sys
import beside
print(__name__, sys.argv, "x" in globals(), beside.there)
made = sys.argv[1:]
_kept = 1
def f():
    return made
if made[:1] == ["leave"]:
    sys.exit()
"""


@pytest.mark.parametrize(
    "options",
    [
        "sub/m.py",
        "sub/m a 'b c'",
        "-i sub/m.py",
        "-n sub/m.py",
        "-t sub/m.py",
        "sub/m.py leave",
        "sub/m.py sub/*.py",
        "-G sub/m.py *.py",
    ],
)
def test_a_python_file(options: str, folder: Path, ipython: Shell) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("there = 1", encoding="utf-8")
    (folder / "sub" / "m.py").write_text(PYTHON, encoding="utf-8")
    shown = "print(made, f(), _kept, x, __name__)"
    assert "sub/m.py" in both(f"x = 1\n%run {options}\n{shown}", folder, ipython)


@pytest.mark.usefixtures("starts_processes")
def test_a_module(folder: Path) -> None:
    (folder / "m.py").write_text("import sys\nx = sys.argv[1:], __name__", encoding="utf-8")
    script = convert(notebook("import sys; sys.path.insert(0, '.')\n%run -m m a\nprint(x)"))
    assert run(script, folder).stdout == "(['a'], '__main__')\n"


@pytest.mark.usefixtures("starts_processes")
def test_files_beside_the_notebook_are_found(tmp_path: Path, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "m.py").write_text("x = 1", encoding="utf-8")
    write(folder / "sub" / "n.ipynb", "y = x")
    source = "%run m.py\n%run n.ipynb\nprint(y)"
    script = convert(notebook(source, path=str(folder / "sub" / "nb.ipynb")))
    assert run(script, folder).stdout == "1\n"


def test_a_script_without_it_has_nothing_of_it(folder: Path) -> None:
    assert "_run_" not in convert(notebook("x = 1")).text


@pytest.mark.usefixtures("starts_processes")
def test_linters_find_nothing_in_it(folder: Path) -> None:
    write(folder / "other.ipynb", "x = '''a\n\"\"\" \\\\'''", "", "await f()")
    (folder / "m.py").touch()
    source = "async def f(): ...\n%run other.ipynb\n%run m.py\n%run -m m"
    path = folder / "script.py"
    path.write_text(convert(notebook(source)).text, encoding="utf-8")
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run(
        [ruff, "check", "--isolated", "--no-cache", path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


REFUSED = {
    "%run nope.ipynb": r"`%run` needs nope.ipynb, which does not exist in .*tpu-skip",
    "%run nope": r"`%run` needs nope.py, which does not exist",
    "%run {name}.py": "only known in the notebook",
    "%run -d m.py": "needs a debugger",
    "%run": "names no file",
    "%run -q m.py": "cannot parse `%run`: option -q not recognized",
    "%run 'm.py": "cannot parse `%run`: No closing quotation",
    "%run broken.ipynb": r"broken.ipynb, code cell 2, line 2: .*invalid syntax",
    "%run pylab.ipynb": r"pylab.ipynb, code cell 1, line 1: `%pylab` does not work in a script",
    "%run json.ipynb": r"`%run` cannot read json.ipynb: ",
}


@pytest.mark.parametrize(("line", "words"), REFUSED.items())
def test_refused(line: str, words: str, folder: Path) -> None:
    write(folder / "broken.ipynb", "x = 1", "y = 1\nz = = 2")
    write(folder / "pylab.ipynb", "%pylab")
    (folder / "json.ipynb").write_text("{", encoding="utf-8")
    (folder / "m.py").touch()
    with pytest.raises(ConversionError, match=words) as caught:
        convert(notebook("a = 1", f"b = 1\n{line}", "%%tpu_train\nc = 2"))
    assert (caught.value.cell, caught.value.line) == (2, 2)


def test_helpers_keep_their_lines(folder: Path) -> None:
    (folder / "m.py").write_text("x = 1", encoding="utf-8")
    script: Script = convert(notebook("if True:\n    %run m.py\n    y = x\n", "%%tpu_train\ny"))
    assert lines_of(script, 0) == ["if True:", "    _tpunb_run_file('m.py')", "    y = x", ""]
