"""The shell lines and magics of a train cell, and of functions that it calls, run in its ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.drivers.kernel import Kernel, kernel
from tests.notebook.convert.notebooks import notebook
from tpunb.errors import ConversionError
from tpunb.notebook.convert.convert import convert
from tpunb.runs.directory import list_runs

OTHER = """\
!touch included-{rank}
"""
PRELUDE = """\
import os, tpunb
rank = -1
%run other.ipy
!mkdir -p out; echo cell >> calls.txt

def keep(name):
    !echo {name} >> calls.txt; test -d $name
    return _exit_code

if True:
    !touch done.txt
before = keep("out")
"""
TRAIN = """\
rank = int(os.environ["RANK"])
!echo from {rank} of {os.environ["WORLD_SIZE"]}; cat
!echo shell has $WORLD_SIZE
if rank == 0:
    !touch only-first
files = !ls on?y* ; echo {rank}
print(files.s)
get_ipython().system(f"touch by-{rank}")
%env MINE=of {rank}
for name in ["nothing", "out"]:
    print(name, keep(name), os.environ["MINE"])
%mkdir -p in-{rank}
%cd -q in-{rank}
!touch here
%pwd
get_ipython().run_cell_magic("bash", "", "echo bash $RANK")
%run other.ipy
%time total = sum([1, 2])
%matplotlib inline
"""


@pytest.fixture
def nb(starts_processes: None, tmp_path: Path) -> Iterator[Kernel]:
    (tmp_path / "other.ipy").write_text(OTHER)
    with kernel(tmp_path) as made:
        made.run("%load_ext tpunb\n%tpu_setup --cores 2 --backend torch", "load").good()
        made.run(PRELUDE, "prelude").good()
        yield made


def check(book: Path, shown: str, *, runs: int = 1, ranks: int = 2) -> None:
    """`shown`: the lines of the ranks, with or without the ranks' numbers."""
    for rank in range(ranks):
        folder = book / f"in-{rank}"
        wanted = [f"from {rank} of {ranks}", f"nothing 1 of {rank}", f"out 0 of {rank}"]
        for line in [*wanted, f"shell has {ranks}", f"bash {rank}", str(folder)]:
            assert re.search(rf"^(\[(0-1|{rank})\] )?{re.escape(line)}$", shown, re.M), line
        assert (book / f"by-{rank}").exists()
        assert (folder / "here").exists()
        assert (folder / f"included-{rank}").exists()
    assert "%time: " in shown
    assert (book / "only-first").exists()
    # What stands above has run in the notebook, and does not run again.
    calls = (book / "calls.txt").read_text().split()
    assert sorted(calls) == sorted(["cell", "out", *["nothing", "out"] * ranks * runs])


def test_lines_of_a_train_cell_and_of_its_functions_run_in_each_rank(nb: Kernel) -> None:
    check(nb.folder, nb.run(f"%%tpu_train\n{TRAIN}", "train").good().stdout)
    body = TRAIN.replace("\n", "\n    ").replace("%cd", "os.chdir(here)\n    %cd")
    nb.run(f"here = os.getcwd()\ndef train():\n    {body}\n", "function").good()
    check(nb.folder, nb.run("tpunb.launch(train)", "launch").good().stdout, runs=2)


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("option", ["--setup", "--no-setup"])
def test_the_exported_script_does_the_same(tmp_path: Path, ranks: int, option: str) -> None:
    cells = [v4.new_code_cell(source) for source in (PRELUDE, f"%%tpu_train\n{TRAIN}")]
    (tmp_path / "other.ipy").write_text(OTHER)
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "nb.ipynb")

    def run(*command: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    run("tpunb", "convert", "nb.ipynb", "-o", "script.py", *[option] * (option == "--no-setup"))
    if option == "--no-setup":  # for a machine on which the cells above have run
        (tmp_path / "out").mkdir()
        (tmp_path / "calls.txt").write_text("cell\nout\n")
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "script.py"]
    check(tmp_path, run(*launch), ranks=ranks)


def test_a_stop_ends_what_a_line_has_started(nb: Kernel) -> None:
    ran = nb.send(
        "%%tpu_train --grace 5\n!sleep 1234 & echo at work; sleep 1234\nprint('after')", "train"
    )
    nb.until(ran, "at work", times=1)
    nb.interrupt()
    assert "stopped (interrupted in the notebook)" in nb.wait(ran).status
    assert "after" not in ran.stdout
    [run] = list_runs(nb.folder / "runs")
    assert "SIGTERM" not in (run.path / "supervisor.log").read_text()  # nothing was left
    assert not nb.working()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("if True:\n    %pip install x", "line 3: in a train cell, `pip install x` would"),
        ("x = !sudo apt-get -y install x", "Put it into a cell of its own above the train cell"),
        ("%reset -f", "`%reset` does not work in a train cell: ranks have no IPython"),
        ("%sql select 1", "Write it in Python, or put it into a cell above the train cell"),
        ("%%bash\necho\npip install x", "line 4: in a train cell, `pip install x` would"),
    ],
)
def test_what_cannot_run_in_a_rank_is_refused(lines: str, words: str) -> None:
    with pytest.raises(ConversionError) as error:
        convert(notebook("x = 1", f"%%tpu_train\n{lines}"))
    assert words in str(error.value)
    assert error.value.cell == 2
