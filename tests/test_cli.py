"""The command `tpunb`: what it prints, and its exit status."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from tests.kernels import PATIENCE, ROOT, until
from tests.test_listings import made
from tpunb import __version__, cli, listings, rundir
from tpunb.rundir import RunDir, runs_in

SURFACE = {
    "doctor": ["--json", "--import", "--runs DIR"],
    "convert": ["NB.ipynb", "-o --output OUT.py", "--cell N|ID"],
    "run": ["NB.ipynb", "OUT.ipynb", "-p --parameter NAME VALUE", "--cores N|all"],
    "lint": ["NB.ipynb", "--json", "--cell N|ID"],
    "migrate": ["NB.ipynb", "-o --output OUT.ipynb", "--diff", "--train"],
    "diagnose": ["LOG", "--returncode N", "--json"],
    "runs": ["--runs DIR"],
    "logs": [
        "RUN",
        "--rank R",
        "--stream",
        "--level",
        "--grep PATTERN",
        "--context N",
        "--tail N",
        "-f --follow",
        "--runs DIR",
    ],
    "stop": ["RUN", "--runs DIR"],
    "clean": ["--older-than DAYS", "--keep N", "-y --yes", "--runs DIR"],
    "keep": [],
    "data": [
        "SOURCE",
        "--to DIR",
        "--upload URL",
        "--credentials PATH|URL",
        "--no-unpack",
    ],
}
"""What people type into terminals and scripts: changed only with a reason."""

LOAD = "%load_ext tpunb"
PARAMETERS = "cores = 2\nepochs = 1\nname = 'a'"
TRAIN = """%%tpu_train --cores {cores}
import tpunb
tpunb.log(step=epochs, loss=0.25)
print('epochs', epochs + 1, name)"""
FAILING = "%%tpu_train --cores 1\nprint('before')\n1 / 0"


def write(path: Path, *cells: str, parameters: str = "") -> Path:
    made = [v4.new_code_cell(source) for source in cells]
    if parameters:
        made.insert(0, v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    nbformat.write(v4.new_notebook(cells=made), path)
    return path


def command(*words: str | Path, **env: str) -> list[str]:
    return [sys.executable, "-m", "tpunb", *map(str, words)]


def tpunb(cwd: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=cwd, capture_output=True, text=True, timeout=500)


def errors(done: subprocess.CompletedProcess[str]) -> str:
    """Standard error without what ipykernel says when it is interrupted at its end."""
    said = "[IPKernelApp] ERROR | KeyboardInterrupt caught in kernel."
    return "".join(line for line in done.stderr.splitlines(True) if line.strip() != said)


def test_the_surface_is_what_it_was() -> None:
    found = {}
    [commands] = [
        action
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    ]
    for name, parser in commands.choices.items():
        rows = []
        for action in parser._actions:
            if action.dest != "help":
                value = action.metavar or ""
                words = [value] if isinstance(value, str) else list(value)
                rows.append(" ".join([*action.option_strings, *filter(None, words)]))
        found[name] = rows
    assert found == SURFACE


class TestConvert:
    @pytest.fixture
    def notebook(self, tmp_path: Path) -> Path:
        first = "%%tpu_train\nprint('first')"
        return write(tmp_path / "nb.ipynb", LOAD, first, TRAIN, parameters=PARAMETERS)

    def test_to_standard_output(self, notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["convert", str(notebook)]) == 0
        text = capsys.readouterr().out
        assert "# %% cell 4, on every core" in text
        assert "print('epochs', epochs + 1, name)" in text
        assert "print('first')" not in text
        compile(text, "script.py", "exec")

    def test_to_a_file(
        self, notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["convert", str(notebook), "-o", str(tmp_path / "script.py")]) == 0
        assert capsys.readouterr().out == ""
        assert "cell 4, on every core" in (tmp_path / "script.py").read_text()
        assert cli.main(["convert", str(notebook), "-o", str(tmp_path / "no" / "script.py")]) == 1
        assert capsys.readouterr().err == (
            f"tpunb: cannot write {tmp_path}/no/script.py: No such file or directory\n"
        )

    def test_another_cell(self, notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["convert", str(notebook), "--cell", "3"]) == 0
        text = capsys.readouterr().out
        assert "print('first')" in text
        assert "epochs + 1" not in text
        name = nbformat.read(notebook, as_version=4).cells[2].id
        assert cli.main(["convert", str(notebook), "--cell", name]) == 0
        assert capsys.readouterr().out == text
        assert cli.main(["convert", str(notebook), "--cell", "9"]) == 1
        assert "has no code cell '9'" in capsys.readouterr().err

    def test_a_cell_that_is_not_python(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["convert", str(write(tmp_path / "nb.ipynb", "a = 1", "b = ("))]) == 1
        assert capsys.readouterr().err == (
            "tpunb: cell [2], line 1: invalid syntax: '(' was never closed. Mend the cell; begin "
            "shell commands with !; or tag the cell tpu-skip to leave it out of runs\n    b = (\n"
        )

    @pytest.mark.parametrize("name", ["convert", "run", "lint", "migrate"])
    def test_a_file_that_is_not_there_or_no_notebook(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main([name, str(tmp_path / "gone.ipynb")]) == 1
        assert capsys.readouterr().err == f"tpunb: there is no notebook '{tmp_path}/gone.ipynb'\n"
        (tmp_path / "text.ipynb").write_text("{broken")
        assert cli.main([name, str(tmp_path / "text.ipynb")]) == 1
        assert re.match(r"tpunb: .*text.ipynb is not valid JSON \(.*line 1 column 2.*\)\. Save",
                        capsys.readouterr().err)  # fmt: skip
        assert not list(tmp_path.glob("*.out.ipynb"))


OLD = """import torch_xla.core.xla_model as xm
print(xm.xrt_world_size())  # how many
xm.mark_step()"""


class TestLint:
    def test_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lint", str(write(tmp_path / "nb.ipynb", "x = 1", OLD))]) == 1
        text = capsys.readouterr().out
        assert text.startswith(
            "cell [2], line 2: error: `xla_model.xrt_world_size` does not exist in torch_xla 2.9 "
            "[retired-name]\n    print(xm.xrt_world_size())  # how many\n  → Write "
        )
        assert text.endswith("\n1 error, 1 hint\n")

    def test_json(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lint", "--json", str(write(tmp_path / "nb.ipynb", OLD))]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [sorted(one) for one in found] == [
            ["cell", "fix", "line", "message", "rule", "severity"]
        ] * 2
        assert [(one["rule"], one["cell"], one["line"]) for one in found] == [
            ("retired-name", 1, 2),
            ("old-name", 1, 3),
        ]

    def test_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lint", str(write(tmp_path / "nb.ipynb", "x = 1"))]) == 0
        assert capsys.readouterr().out == "Nothing was found.\n"
        assert cli.main(["lint", "--json", str(tmp_path / "nb.ipynb")]) == 0
        assert json.loads(capsys.readouterr().out) == []


class TestMigrate:
    def test_to_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        given = write(tmp_path / "nb.ipynb", "x = 1", OLD)
        before = given.read_bytes()
        assert cli.main(["migrate", str(given)]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"wrote {tmp_path}/nb.migrated.ipynb\n")
        assert "cell [2], line 2: print(xm.xrt_world_size())" in said
        assert given.read_bytes() == before
        made = tmp_path / "nb.migrated.ipynb"
        assert "xr.world_size())  # how many" in made.read_text()
        assert cli.main(["migrate", str(made), "-o", str(tmp_path / "again.ipynb")]) == 0
        assert (tmp_path / "again.ipynb").read_bytes() == made.read_bytes()
        assert cli.main(["lint", str(made)]) == 0

    def test_the_diff_writes_nothing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = write(tmp_path / "nb.ipynb", OLD)
        assert cli.main(["migrate", "--diff", str(given)]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("--- cell [1]\n+++ cell [1]\n")
        assert "-print(xm.xrt_world_size())  # how many\n" in said.out
        assert "rewritten" in said.err
        assert list(tmp_path.iterdir()) == [given]

    def test_a_notebook_that_trains(self, tmp_path: Path) -> None:
        launch = "import torch_xla.distributed.xla_multiprocessing as xmp\n"
        launch += "def f(index):\n    print(index)\nxmp.spawn(f, nprocs=8, start_method='fork')"
        given = write(tmp_path / "nb.ipynb", launch)
        assert cli.main(["migrate", "--train", str(given), "-o", str(tmp_path / "new.ipynb")]) == 0
        sources = [c.source for c in nbformat.read(tmp_path / "new.ipynb", as_version=4).cells]
        assert sources[0] == "%load_ext tpunb"
        assert sources[1].startswith("%%tpu_train\n")
        assert cli.main(["convert", str(tmp_path / "new.ipynb"), "-o", str(tmp_path / "s.py")]) == 0


class TestDiagnose:
    LOG = "[0] step 1\n[1 err] OSError: [Errno 28] No space left on device\n"

    def test_a_log(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "log").write_text(self.LOG)
        assert cli.main(["diagnose", str(tmp_path / "log"), "--returncode", "1"]) == 0
        text = capsys.readouterr().out
        assert "[disk-full]" in text
        assert "  | rank 1: " in text
        assert "  fix: " in text
        assert cli.main(["diagnose", str(tmp_path / "log"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert sorted(found[0]) == ["cause", "confidence", "evidence", "fix", "id"]
        assert found[0]["id"] == "disk-full"

    def test_standard_input(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(self.LOG.encode())))
        assert cli.main(["diagnose", "-"]) == 0
        assert "[disk-full]" in capsys.readouterr().out

    def test_nothing_known_is_said(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "log").write_text("one\nValueError: the moon is full\ntwo\n")
        assert cli.main(["diagnose", str(tmp_path / "log")]) == 1
        assert capsys.readouterr().out == (
            "No cause is known. The most telling lines:\n  | ValueError: the moon is full\n"
        )
        assert cli.main(["diagnose", "--json", str(tmp_path / "log")]) == 1
        assert json.loads(capsys.readouterr().out) == []
        assert cli.main(["diagnose", str(tmp_path / "gone")]) == 1
        assert capsys.readouterr().err == f"tpunb: there is no log '{tmp_path}/gone'\n"


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a notebook has made a good run and a bad one, and gone on to its end."""
    folder = tmp_path_factory.mktemp("two-runs")
    train = "%%tpu_train --cores 2 --no-raise --name {name}\nimport os\n"
    train += "print(name, os.environ['RANK'])"
    cells = ["name = 'one'", train, "name = 'two'", f"{train}\n1 / 0", "print('went', 'on')"]
    write(folder / "nb.ipynb", LOAD, *cells)
    done = tpunb(folder, "run", "nb.ipynb")
    (folder / "status").write_text(str(done.returncode))
    (folder / "printed").write_text(done.stdout)
    return folder


@pytest.mark.slow
class TestRun:
    def test_parameters_and_cores(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", LOAD, TRAIN, "print(name)", parameters=PARAMETERS)
        words = ["-p", "epochs", "4", "-p", "name", "b c", "--cores", "1"]
        done = tpunb(tmp_path, "run", "nb.ipynb", "made/out.ipynb", *words)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(
            r"nb: succeeded on 1 rehearsal core in \d+\.\d s · loss 0.25\n", done.stdout
        )
        assert errors(done) == ""
        [run] = runs_in(tmp_path / "runs")
        first, line = run.log.read_text().splitlines()
        assert first.startswith("[tpunb] rehearsal on CPU")
        assert line == "[0] epochs 5 b c"
        out = nbformat.read(tmp_path / "made/out.ipynb", as_version=4)
        # a kernel under load may send one print in pieces
        assert "".join(part.text for part in out.cells[-1].outputs) == "b c\n"
        assert (run.path / "notebook.ipynb").read_bytes() == (tmp_path / "nb.ipynb").read_bytes()

    def test_a_failed_run_fails_even_where_the_cell_does_not(self, two_runs: Path) -> None:
        # a kernel under load may send one print in pieces
        last = nbformat.read(two_runs / "nb.out.ipynb", as_version=4).cells[-1]
        assert "".join(out.text for out in last.outputs) == "went on\n"
        assert (two_runs / "status").read_text() == "1"
        one, two = (two_runs / "printed").read_text().splitlines()
        assert one.startswith("one: succeeded on 2 rehearsal cores in ")
        assert two.startswith("two: failed on 2 rehearsal cores in ")

    def test_a_failed_cell_is_told_as_in_the_notebook(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", LOAD, FAILING, "print('went', 'on')")
        done = tpunb(tmp_path, "run", "nb.ipynb")
        assert done.returncode == 1
        assert errors(done).startswith(
            "tpunb: nb.ipynb, cell [2]: RankFailedError: rank 0 failed in cell [2], line 3: "
            "ZeroDivisionError: division by zero\n"
        )
        assert "site-packages" not in errors(done)
        # Nobody can unfold one here, nor in the notebook that is left.
        assert done.stderr.count("Traceback (most recent call last)") == 1
        cells = nbformat.read(tmp_path / "nb.out.ipynb", 4).cells
        [outputs] = [cell.outputs for cell in cells if cell.source == FAILING]
        assert [out.output_type for out in outputs if "Traceback (" in str(out)] == ["error"]
        assert "went on" not in (tmp_path / "nb.out.ipynb").read_text()

    def test_what_a_magic_refuses_is_told_too(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", LOAD, "%%tpu_train --corse 2\npass")
        done = tpunb(tmp_path, "run", "nb.ipynb")
        assert done.returncode == 1
        assert errors(done).startswith(
            "tpunb: nb.ipynb, cell [2]: UsageError: %%tpu_train: unrecognized arguments: --corse 2"
        )

    def test_runs_in_the_background_and_detached_ones_count_too(self, tmp_path: Path) -> None:
        """The notebook is at its end before they are: one ends with the kernel, one later."""
        work = "import time\nfor i in range({n}):\n    time.sleep(0.1)\nprint('whole')"
        cells = [
            f"%%tpu_train --cores 1 --detach --name far\n{work.format(n=20)}",
            f"%%tpu_train --cores 1 --bg --name near\n{work.format(n=6000)}",
            "import os, time\nwhile not os.path.exists(h) or 'training' not in open(h).read():\n"
            "    time.sleep(0.1)",
        ]
        cells.insert(
            2, "import glob\n[h] = [f'{f}/events.jsonl' for f in glob.glob('runs/*-near')]"
        )
        write(tmp_path / "nb.ipynb", LOAD, *cells)
        done = tpunb(tmp_path, "run", "nb.ipynb")
        far, near = done.stdout.splitlines()
        assert far.startswith("far: succeeded on 1 rehearsal core in ")
        assert near.startswith("near: interrupted on 1 rehearsal core in ")
        assert done.returncode == 1

    def test_a_notebook_that_trains_nothing(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", "print(1)")
        done = tpunb(tmp_path, "run", "nb.ipynb")
        assert (done.returncode, done.stdout) == (1, "")
        assert errors(done) == "tpunb: nb.ipynb: no cell ran %%tpu_train\n"

    def test_a_kernel_that_dies(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", "import os\nos._exit(1)")
        done = tpunb(tmp_path, "run", "nb.ipynb")
        assert done.returncode == 1
        assert "tpunb: nb.ipynb: Kernel died" in done.stderr
        assert "Traceback" not in errors(done)

    def test_ctrl_c_stops_the_run_and_leaves_nothing(self, tmp_path: Path) -> None:
        train = """%%tpu_train --cores 2
import os, time
try:
    open('started ' + os.environ['RANK'], 'w')
    time.sleep(600)
except KeyboardInterrupt:
    open('saved ' + os.environ['RANK'], 'w')
    raise"""
        write(tmp_path / "nb.ipynb", LOAD, train)
        with subprocess.Popen(
            command("run", "nb.ipynb"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            until(lambda: len(list(tmp_path.glob("started *"))) == 2, "both ranks at work")
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert error.endswith("tpunb: interrupted\n")
        [run] = runs_in(tmp_path / "runs")
        until(lambda: run.read_result(), "the run's result")
        assert len(list(tmp_path.glob("saved *"))) == 2

    def test_a_terminal_has_the_lines_as_they_come(self, tmp_path: Path) -> None:
        wait = (
            "import pathlib, time\nwhile not pathlib.Path('go on').exists():\n    time.sleep(0.05)"
        )
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
        [run] = runs_in(tmp_path / "runs")
        assert seen.startswith(f"run {run.id}\r\n[tpunb] rehearsal on CPU".encode())

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("00_quickstart", ["-p", "epochs", "8"]),
            pytest.param("01_spawn_unchanged", [], marks=pytest.mark.long),
        ],
    )
    def test_the_notebooks_of_this_project(
        self, name: str, words: list[str], tmp_path: Path
    ) -> None:
        """Each asserts the accuracy that it reaches."""
        shutil.copy(ROOT / "notebooks" / f"{name}.ipynb", tmp_path)
        done = tpunb(tmp_path, "run", f"{name}.ipynb", "--cores", "2", *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{name}: succeeded on 2 rehearsal cores in ")
        cells = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4).cells
        assert any(re.search(r"^assert accurac\S+ >= 0\.9", c.source, re.MULTILINE) for c in cells)


@pytest.mark.slow
class TestListings:
    @pytest.fixture(autouse=True)
    def _there(self, two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(two_runs)

    def test_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["runs"]) == 0
        heads, one, two = capsys.readouterr().out.splitlines()
        assert heads.split() == ["run", "state", "cores", "time", "started", "size"]
        assert re.match(
            r"\d{8}-\d{6}-one +succeeded +2 CPU +\d+ s +\d{4}-\d\d-\d\d \d\d:\d\d +\S+ kB$", one
        )
        assert re.match(r"\d{8}-\d{6}-two +failed +2 CPU ", two)

    def test_runs_elsewhere(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["runs", "--runs", "/nowhere"]) == 0
        assert capsys.readouterr().out == "There are no runs in /nowhere yet.\n"

    def test_logs(self, capsys: pytest.CaptureFixture[str]) -> None:
        def logs(*words: str) -> list[str]:
            assert cli.main(["logs", *words]) == 0
            return sorted(capsys.readouterr().out.splitlines())

        assert any(line.endswith(" err] ZeroDivisionError: division by zero") for line in logs())
        *lines, last = logs("one")
        assert last.startswith("[tpunb] rehearsal on CPU")
        assert lines == ["[0] one 0", "[1] one 1"]
        assert logs("one", "--rank", "1") == ["[1] one 1"]
        assert logs("one", "--tail", "0") == []
        assert len(logs("one", "--tail", "1")) == 1
        assert logs("one", "--grep", "ONE.[1-9]", "--stream", "stdout") == []
        assert logs("one", "--grep", "one.[1-9]", "--stream", "stdout") == ["[1] one 1"]
        assert cli.main(["logs", "one", "--level", "error"]) == 0
        out, error = capsys.readouterr()
        assert out == ""
        assert re.match(r"tpunb: no line of run \S+-one fits \(.*run\.log\)$", error)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["three"], "has 'three' in its id; the latest are: "),
            (["20"], "'20' fits several runs: "),
            (["one", "--rank", "2"], "-one has no rank 2: its ranks are 0 to 1"),
            (["--runs", "/nowhere"], "there are no runs in /nowhere"),
        ],
    )
    def test_what_is_not_there(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["logs", *words]) == 1
        error = capsys.readouterr().err
        assert error.startswith("tpunb: ")
        assert message in error
        assert error.count("\n") == 1

    def test_logs_followed(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["logs", "one", "--follow", "--rank", "1"]) == 0
        out, error = capsys.readouterr()
        assert out == "[1] one 1\n"
        assert re.match(r"tpunb: run \S+-one has ended: succeeded, at 20\S+ \S+, after ", error)

    def test_stop(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["stop", "two"]) == 0
        assert re.match(r"run \S+-two has ended: failed \(", capsys.readouterr().out)
        assert cli.main(["stop"]) == 1
        assert "goes on; the latest: run " in capsys.readouterr().err

    def test_a_reader_that_has_seen_enough(self, two_runs: Path) -> None:
        [run, _] = runs_in(two_runs / "runs")
        large = RunDir(two_runs / "large" / run.id)
        shutil.copytree(run.path, large.path)
        large.log.write_text("[0] a line\n" * 100_000)
        line = f"{' '.join(command('logs', '--runs', 'large'))} | head -1"
        done = subprocess.run(
            ["bash", "-c", line], cwd=two_runs, capture_output=True, text=True, timeout=300
        )
        assert (done.stdout, done.stderr) == ("[0] a line\n", "")


class TestClean:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Five runs of different age and end, one that goes on, and what is none of ours."""
        monkeypatch.chdir(tmp_path)
        folder = tmp_path / "runs"
        for name in ("a", "b", "c"):
            made(folder, name, state="succeeded")
        lost = made(folder, "lost")
        lost.lock.unlink()
        lost.log.write_text("x" * 20_000)
        (folder / "Nov21_13-42-29_tensorboard").mkdir()
        (folder / "Nov21_13-42-29_tensorboard/events.out").touch()
        (folder / "20260101-000000-mine").mkdir()
        (folder / "20260101-000000-mine/thesis.tex").touch()
        for path in [*folder.glob("*-lost/*"), *folder.glob("*-lost")]:
            os.utime(path, (1_700_000_000, 1_700_000_000))
        return folder

    def left(self, folder: Path) -> set[str]:
        return {path.name.rpartition("-")[2] for path in folder.iterdir()}

    OTHERS = frozenset({"29_tensorboard", "mine"})

    def test_asks_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        for answer in ("", "n", "yes please"):
            monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
            assert cli.main(["clean"]) == 0
            assert capsys.readouterr().out.endswith("\nNothing was removed.\n")
        assert self.left(folder) == {"a", "b", "c", "lost", *self.OTHERS}
        asked = []
        monkeypatch.setattr("builtins.input", lambda prompt: asked.append(prompt) or "y")
        assert cli.main(["clean"]) == 0
        assert asked == [f"Remove from {folder}? [y/N] "]
        heads, *rows, total, removed = capsys.readouterr().out.splitlines()
        assert heads.split() == ["run", "state", "cores", "time", "started", "size"]
        assert len(rows) == 4
        assert re.search(r"-lost +lost +2 CPU +\? +2023-\S+ \S+ +20 kB", "\n".join(rows))
        assert re.match(r"4 runs, 2\d kB$", total)
        assert removed == "Removed."
        assert self.left(folder) == self.OTHERS
        assert cli.main(["clean"]) == 0
        assert capsys.readouterr().out == f"There is nothing to remove in {folder}.\n"

    def test_without_a_terminal_it_refuses(self, folder: Path) -> None:
        done = subprocess.run(
            command("clean"), cwd=folder.parent, capture_output=True, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr == (
            "tpunb: nothing was removed: there is no terminal to ask at; -y does not ask\n"
        )
        assert self.left(folder) == {"a", "b", "c", "lost", *self.OTHERS}

    def test_what_is_kept(self, folder: Path) -> None:
        assert cli.main(["clean", "-y", "--keep", "3"]) == 0
        assert len(self.left(folder)) == 3 + len(self.OTHERS)
        young = made(folder, "young", state="failed")
        result = json.loads(young.result.read_text())
        rundir.write_json(young.result, {**result, "ended": time.time() - 3600})
        assert cli.main(["clean", "-y", "--older-than", "1"]) == 0
        assert self.left(folder) == {"young", *self.OTHERS}
        assert cli.main(["clean", "-y", "--older-than", "0.01"]) == 0
        assert self.left(folder) == self.OTHERS

    def test_never_one_that_goes_on(self, folder: Path) -> None:
        on, starting = made(folder, "on"), made(folder, "starting")
        starting.lock.unlink()
        with open(on.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = listings.old(folder, None, 0)
            assert {one.run.id for one in found}.isdisjoint({on.id, starting.id})
            later = listings.kept(folder)  # as if it had begun since it was listed
            listings.remove(later)
            assert self.left(folder) == {"on", "starting", *self.OTHERS}

    def test_a_folder_that_a_crash_has_left_half_written(self, folder: Path) -> None:
        for name in ("empty", "early", "cut"):
            (folder / f"20251231-235959-{name}").mkdir()
        (folder / "20251231-235959-early/script.py").write_text("a = 1")
        (folder / "20251231-235959-early/.spec.json.x1").write_text("{")
        (folder / "20251231-235959-cut/spec.json").write_text("")
        for path in folder.glob("20251231*"):
            os.utime(path, (1_767_000_000, 1_767_000_000))
        rows = {line.split()[0]: line.split()[1:4] for line in listings.table(folder).splitlines()}
        for name in ("empty", "early", "cut"):
            assert rows[f"20251231-235959-{name}"] == ["lost", "?", "?"]
        assert cli.main(["clean", "-y"]) == 0
        assert self.left(folder) == self.OTHERS

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--older-than=-1"], "'-1' is not a number of days"),
            (["--keep=x"], "'x' is not a whole"),
        ],
    )
    def test_what_is_refused(
        self, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["clean", *words])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("how", ["python -m tpunb", "tpunb"])
def test_version_and_help(how: str, tmp_path: Path) -> None:
    words = {"tpunb": [str(Path(sys.executable).with_name("tpunb"))]}.get(how, command())
    env = {**os.environ, "COLUMNS": "100"}

    def said(*more: str) -> str:
        done = subprocess.run(
            [*words, *more], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert said("--version") == f"{__version__}\n"
    text = said("--help")
    assert "the script that %%tpu_train would run" in text
    for name in SURFACE:
        assert re.search(rf"^    {name} +\w", text, re.MULTILINE)


def test_without_a_command() -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2


@pytest.mark.parametrize("cores", ["0", "-1", "two", "1.5"])
def test_cores_are_checked_at_once(cores: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "nb.ipynb", f"--cores={cores}"])
    assert ended.value.code == 2
    assert f"--cores: '{cores}' is not a number of cores (or 'all')" in capsys.readouterr().err
