"""More of tests/test_cli.py, which takes longer."""

from __future__ import annotations

import os
import select
import subprocess
from pathlib import Path

import nbformat
import pytest

from tests.drivers.kernel import PATIENCE
from tests.test_cli import FAILING, LOAD, command, errors, tpunb, two_runs, write
from tpunb.runs.directory import list_runs

pytestmark = pytest.mark.usefixtures("lent")


def test_a_failed_run_fails_even_where_the_cell_does_not(two_runs: Path) -> None:
    # a kernel under load may send one print in pieces
    last = nbformat.read(two_runs / "nb.out.ipynb", as_version=4).cells[-1]
    assert "".join(out.text for out in last.outputs) == "went on\n"
    assert (two_runs / "status").read_text() == "1"
    one, two = (two_runs / "printed").read_text().splitlines()
    assert one.startswith("one: succeeded on 2 rehearsal cores in ")
    assert two.startswith("two: failed on 2 rehearsal cores in ")


def test_a_failed_cell_is_reported_as_in_the_notebook(tmp_path: Path) -> None:
    write(tmp_path / "nb.ipynb", LOAD, FAILING, "print('went', 'on')")
    done = tpunb(tmp_path, "run", "nb.ipynb")
    assert done.returncode == 1
    assert errors(done).startswith(
        "tpunb: nb.ipynb, cell [2]: RankFailedError: rank 0 failed in cell [2], line 3: "
        "ZeroDivisionError: division by zero\n"
    )
    assert "site-packages" not in errors(done)
    # No traceback is folded: a terminal and the saved notebook cannot unfold it.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    cells = nbformat.read(tmp_path / "nb.out.ipynb", 4).cells
    [outputs] = [cell.outputs for cell in cells if cell.source == FAILING]
    assert [out.output_type for out in outputs if "Traceback (" in str(out)] == ["error"]
    assert "went on" not in (tmp_path / "nb.out.ipynb").read_text()


def test_exit_code_includes_background_and_detached_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook ends before its runs: one ends with the kernel, one later."""
    monkeypatch.delenv("IPYTHONDIR")  # a lender would end the runs that are left
    work = "import time\nfor i in range({n}):\n    time.sleep(0.1)\nprint('whole')"
    cells = [
        f"%%tpu_train --cores 1 --detach --name far\n{work.format(n=20)}",
        f"%%tpu_train --cores 1 --bg --name near\n{work.format(n=6000)}",
        "import os, time\nwhile not os.path.exists(h) or 'training' not in open(h).read():\n"
        "    time.sleep(0.1)",
    ]
    cells.insert(2, "import glob\n[h] = [f'{f}/events.jsonl' for f in glob.glob('runs/*-near')]")
    write(tmp_path / "nb.ipynb", LOAD, *cells)
    done = tpunb(tmp_path, "run", "nb.ipynb")
    far, near = done.stdout.splitlines()
    assert far.startswith("far: succeeded on 1 rehearsal core in ")
    assert near.startswith("near: interrupted on 1 rehearsal core in ")
    assert done.returncode == 1


def test_a_terminal_shows_the_lines_as_they_come(tmp_path: Path) -> None:
    wait = "import pathlib, time\nwhile not pathlib.Path('go on').exists():\n    time.sleep(0.05)"
    write(tmp_path / "nb.ipynb", LOAD, f"%%tpu_train --cores 1\nprint('here')\n{wait}")
    ours, theirs = os.openpty()
    with subprocess.Popen(
        command("run", "nb.ipynb"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while b"[0] here" not in seen:
            assert select.select([ours], [], [], PATIENCE)[0], seen
            seen += os.read(ours, 4096)
        assert process.poll() is None
        (tmp_path / "go on").touch()
        out, _ = process.communicate(timeout=PATIENCE)
    os.close(ours)
    assert out.startswith(b"nb: succeeded on 1 rehearsal core in ")
    [run] = list_runs(tmp_path / "runs")
    assert seen.startswith(f"run {run.id}\r\n[tpunb] rehearsal on CPU".encode())
