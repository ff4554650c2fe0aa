"""The command `tpunb`: its output and exit status."""

from __future__ import annotations

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
import yaml
from nbformat import v4

from tests.drivers.kernel import PATIENCE, until
from tests.runs.test_listing import made
from tpunb import __version__, cli
from tpunb.errors import TpunbError
from tpunb.kernel.papermill import run_notebook
from tpunb.runs import listing
from tpunb.runs.directory import RunDir, list_runs
from tpunb.utils import files, terminal

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
    """Return standard error without ipykernel's message for an interrupt at its end."""
    said = "[IPKernelApp] ERROR | KeyboardInterrupt caught in kernel."
    return "".join(line for line in done.stderr.splitlines(True) if line.strip() != said)


class TestConvert:
    @pytest.fixture
    def notebook(self, tmp_path: Path) -> Path:
        first = "%%tpu_train\nprint('first')"
        return write(tmp_path / "nb.ipynb", LOAD, first, TRAIN, parameters=PARAMETERS)

    def test_convert_to_standard_output(
        self, notebook: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["convert", str(notebook)]) == 0
        text = capsys.readouterr().out
        assert "# %% cell 4, on every core" in text
        assert "print('epochs', epochs + 1, name)" in text
        assert text.index("print('first')") < text.index("# %% cell 4")  # it runs in its place
        compile(text, "script.py", "exec")

    def test_convert_to_a_file(
        self, notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["convert", str(notebook), "-o", str(tmp_path / "script.py")]) == 0
        assert capsys.readouterr().out == ""
        assert "cell 4, on every core" in (tmp_path / "script.py").read_text()
        assert cli.main(["convert", str(notebook), "-o", str(tmp_path / "no" / "script.py")]) == 1
        assert capsys.readouterr().err == (
            f"tpunb: cannot write {tmp_path}/no/script.py: No such file or directory\n"
        )

    def test_convert_cell_option(self, notebook: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["convert", str(notebook), "--cell", "3"]) == 0
        text = capsys.readouterr().out
        assert "print('first')" in text
        assert "epochs + 1" not in text
        name = nbformat.read(notebook, as_version=4).cells[2].id
        assert cli.main(["convert", str(notebook), "--cell", name]) == 0
        assert capsys.readouterr().out == text
        assert cli.main(["convert", str(notebook), "--cell", "9"]) == 1
        assert "has no code cell '9'" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["convert", "run", "lint"])
    def test_a_missing_file_and_a_file_that_is_not_a_notebook(
        self, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main([name, str(tmp_path / "gone.ipynb")]) == 1
        assert capsys.readouterr().err == f"tpunb: there is no notebook '{tmp_path}/gone.ipynb'\n"
        (tmp_path / "text.ipynb").write_text("{broken")
        assert cli.main([name, str(tmp_path / "text.ipynb")]) == 1
        assert re.match(
            r"tpunb: .*text.ipynb is not valid JSON \(.*line 1 column 2.*\)\. Save",
            capsys.readouterr().err,
        )
        assert not list(tmp_path.glob("*.out.ipynb"))


OLD = """import torch_xla.core.xla_model as xm
xm.get_log_fn()  # to print
y = 1  # tpunb: ignore[no-rule]"""


class TestLint:
    def test_lint_as_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["lint", str(write(tmp_path / "nb.ipynb", "x = 1", OLD))]) == 1
        text = capsys.readouterr().out
        assert text.startswith(
            "cell [2], line 2: error: `xla_model.get_log_fn` does not exist in torch_xla 2.9 "
            "[retired-name]\n    xm.get_log_fn()  # to print\n  → Print "
        )
        assert text.endswith("\n1 error, 1 hint\n")

    def test_lint_of_several_notebooks(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one, two = write(tmp_path / "one.ipynb", OLD), write(tmp_path / "two.ipynb", "x = 1")
        gone = tmp_path / "gone.ipynb"
        assert cli.main(["lint", str(two), str(two)]) == 0
        assert cli.main(["lint", str(two), str(gone)]) == 1
        capsys.readouterr()
        assert cli.main(["lint", str(gone), str(two), str(one)]) == 1
        said = capsys.readouterr()
        assert said.out.startswith(f"{one}:\n\ncell [1], line 2: error: ")
        assert said.out.endswith("\n1 error, 1 hint\n")
        assert said.err == f"tpunb: there is no notebook '{gone}'\n"
        assert cli.main(["lint", "--json", str(two), str(one)]) == 1
        found = json.loads(capsys.readouterr().out)
        assert [(f["notebook"], f["rule"]) for f in found] == [
            (str(one), "retired-name"),
            (str(one), "unknown-rule"),
        ]
        assert cli.main(["lint", "--cell", "1", str(two), str(one)]) == 1
        assert "--cell names the train cell of one notebook" in capsys.readouterr().err

    def test_the_hook_for_pre_commit_is_this_command(self) -> None:
        [hook] = yaml.safe_load((Path(__file__).parents[1] / ".pre-commit-hooks.yaml").read_text())
        program, *arguments = hook["entry"].split()
        assert program == "tpunb"
        assert cli.make_parser().parse_args([*arguments, "a.ipynb", "b.ipynb"]).notebooks


class TestDiagnose:
    LOG = "[0] step 1\n[1 err] OSError: [Errno 28] No space left on device\n"

    def test_diagnose_log_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
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
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(self.LOG.encode())))
        assert cli.main(["diagnose", "-"]) == 0
        assert "[disk-full]" in capsys.readouterr().out
        ours, shells = os.pipe()
        os.write(shells, self.LOG.encode())
        os.close(shells)
        assert cli.main(["diagnose", f"/dev/fd/{ours}"]) == 0  # as the shell writes <(command)
        os.close(ours)
        assert "[disk-full]" in capsys.readouterr().out

    def test_diagnose_without_a_known_cause(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "log").write_text("one\nValueError: the moon is full\ntwo\n")
        assert cli.main(["diagnose", str(tmp_path / "log")]) == 1
        assert capsys.readouterr().out == (
            "No known cause. The most relevant lines:\n  | ValueError: the moon is full\n"
        )
        assert cli.main(["diagnose", "--json", str(tmp_path / "log")]) == 1
        assert json.loads(capsys.readouterr().out) == []
        assert cli.main(["diagnose", "--json", "--returncode", "0", str(tmp_path / "log")]) == 0
        assert json.loads(capsys.readouterr().out) == []
        assert cli.main(["diagnose", "--returncode", "0", str(tmp_path / "log")]) == 0
        assert capsys.readouterr().out == (
            "The program ended with exit code 0: the log shows no failure.\n"
        )
        assert cli.main(["diagnose", str(tmp_path / "gone")]) == 1
        assert capsys.readouterr().err == f"tpunb: there is no log '{tmp_path}/gone'\n"
        monkeypatch.setattr("sys.stdin", None)  # as Python has it where it is closed
        assert cli.main(["diagnose", "-"]) == 1
        assert capsys.readouterr().err == "tpunb: there is no log '-'\n"


@pytest.fixture(scope="module")
def two_runs(lent: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a notebook has made a successful and a failed run."""
    folder = tmp_path_factory.mktemp("two-runs")
    train = "%%tpu_train --cores 2 --no-raise --name {name}\nimport os\n"
    train += "print(name, os.environ['RANK'])"
    cells = ["name = 'one'", train, "name = 'two'", f"{train}\n1 / 0", "print('went', 'on')"]
    write(folder / "nb.ipynb", LOAD, *cells)
    done = tpunb(folder, "run", "nb.ipynb")
    (folder / "status").write_text(str(done.returncode))
    (folder / "printed").write_text(done.stdout)
    return folder


@pytest.mark.parametrize(
    ("cells", "parameters", "name", "words"),
    [
        (["lr"], "lr = 1\nepochs = 2", "learning_rate", "; its parameters are: epochs, lr"),
        (["lr"], "lr = 1\nepochs = 2", "epoch", "; did you mean epochs?"),
        (["x = 2\nprint(x)"], "lr = 1", "x", "; its parameters are: lr"),
        (["x = 2\nprint(x)"], "", "x", ": no cell of it is tagged `parameters`; tag the one"),
    ],
)
def test_unknown_notebook_parameter_is_refused(
    tmp_path: Path, cells: list[str], parameters: str, name: str, words: str
) -> None:
    given = write(tmp_path / "nb.ipynb", *cells, parameters=parameters)
    with pytest.raises(TpunbError, match=f"-p {name}: .*nb.ipynb has no such parameter{words}"):
        run_notebook(given, None, {"lr": "1", name: "2"} if parameters else {name: "2"}, None)
    assert list(tmp_path.iterdir()) == [given]


@pytest.mark.usefixtures("lent")
class TestRun:
    def test_run_with_parameters_and_cores(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", LOAD, TRAIN, "print(name)", parameters=PARAMETERS)
        words = ["-p", "epochs", "4", "-p", "name", "b c", "--cores", "1"]
        done = tpunb(tmp_path, "run", "nb.ipynb", "made/out.ipynb", *words)
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(
            r"nb: succeeded on 1 rehearsal core in \d+\.\d s · loss 0.25\n", done.stdout
        )
        assert errors(done) == ""
        [run] = list_runs(tmp_path / "runs")
        first, line = run.log.read_text().splitlines()
        assert first.startswith("[tpunb] rehearsal on CPU")
        assert line == "[0] epochs 5 b c"
        out = nbformat.read(tmp_path / "made/out.ipynb", as_version=4)
        # a kernel under load may send one print in pieces
        assert "".join(part.text for part in out.cells[-1].outputs) == "b c\n"
        assert (run.path / "notebook.ipynb").read_bytes() == (tmp_path / "nb.ipynb").read_bytes()

    def test_a_notebook_that_trains_nothing(self, tmp_path: Path) -> None:
        write(tmp_path / "nb.ipynb", "print(1)")
        done = tpunb(tmp_path, "run", "nb.ipynb")
        assert (done.returncode, done.stdout) == (1, "")
        assert errors(done) == "tpunb: nb.ipynb: no cell ran %%tpu_train\n"

    def test_kernel_death_is_reported(self, tmp_path: Path) -> None:
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
        [run] = list_runs(tmp_path / "runs")
        until(lambda: run.read_result(), "the run's result")
        assert len(list(tmp_path.glob("saved *"))) == 2


class TestListings:
    @pytest.fixture(autouse=True)
    def _there(self, two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(two_runs)

    def test_logs_remove_terminal_control_sequences(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        title, red = "\x1b]0;owned\x07\x1bc\x1b[6n\x9b5n", "\x1b[31mred\x1b[0m"
        run = next(run for run in list_runs(listing.default_folder()) if "one" in run.id)
        with open(run.log, "a") as file:
            file.write(f"[0] {title}{red}\n")
        assert cli.main(["logs", "one", "--tail", "1"]) == 0
        assert capsys.readouterr().out == f"[0] {title}{red}\n"  # a file gets everything
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        for more in ([], ["--follow"]):
            assert cli.main(["logs", "one", "--tail", "1", *more]) == 0
            assert capsys.readouterr().out == f"[0] {red}\n"
        assert cli.main(["logs", "one", "--level", "error"]) == 0
        out, error = capsys.readouterr()
        assert out == ""
        assert re.match(r"tpunb: no matching lines in run \S+-one \(.*run\.log\)$", error)
        assert cli.main(["logs", "\x1b[31mx"]) == 1
        assert "\x1b" not in capsys.readouterr().err
        assert terminal.coloured("a\x1b]0;x\x07b") == "a␛]0;x␇b"

    def test_logs_to_a_closed_pipe(self, two_runs: Path) -> None:
        [run, _] = list_runs(two_runs / "runs")
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
        """Runs of different ages and states, and folders that are not runs of tpunb."""
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

    def test_clean_asks_first(
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
        assert heads.split() == ["run", "state", "size", "cores", "time"]
        assert len(rows) == 4
        assert re.search(r"-lost +lost +20 kB +2 CPU +\?", "\n".join(rows))
        assert re.match(r"4 runs, 2\d kB$", total)
        assert removed == "Removed."
        assert self.left(folder) == self.OTHERS
        assert cli.main(["clean"]) == 0
        assert capsys.readouterr().out == f"There is nothing to remove in {folder}.\n"

    def test_clean_without_a_terminal_is_refused(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
        assert cli.main(["clean"]) == 1
        assert "nothing was removed: standard input is not a terminal" in capsys.readouterr().err
        assert self.left(folder) == {"a", "b", "c", "lost", *self.OTHERS}

    def test_clean_keep_and_older_than_options(self, folder: Path) -> None:
        assert cli.main(["clean", "-y", "--keep", "3"]) == 0
        assert len(self.left(folder)) == 3 + len(self.OTHERS)
        young = made(folder, "young", state="failed")
        result = json.loads(young.result.read_text())
        files.write_json(young.result, {**result, "ended": time.time() - 3600})
        assert cli.main(["clean", "-y", "--older-than", "1"]) == 0
        assert self.left(folder) == {"young", *self.OTHERS}
        assert cli.main(["clean", "-y", "--older-than", "0.01"]) == 0
        assert self.left(folder) == self.OTHERS

    def test_clean_never_removes_active_runs(self, folder: Path) -> None:
        on, starting = made(folder, "on"), made(folder, "starting")
        starting.lock.unlink()
        with open(on.lock) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = listing.find_old(folder, None, 0)
            assert {one.run.id for one in found}.isdisjoint({on.id, starting.id})
            later = listing.list_stored(folder)  # as if it had begun after it was listed
            listing.remove_runs(later)
            assert self.left(folder) == {"on", "starting", *self.OTHERS}


@pytest.mark.usefixtures("starts_processes")
def test_version_and_help(tmp_path: Path) -> None:
    words = [str(Path(sys.executable).with_name("tpunb"))]
    env = {**os.environ, "COLUMNS": "100"}

    def said(*more: str) -> str:
        done = subprocess.run(
            [*words, *more], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert said("--version") == f"{__version__}\n"
    assert "the script that %%tpu_train would run" in said("--help")


@pytest.mark.usefixtures("lent")
def test_a_failed_run_fails_even_where_the_cell_does_not(two_runs: Path) -> None:
    # a kernel under load may send one print in pieces
    last = nbformat.read(two_runs / "nb.out.ipynb", as_version=4).cells[-1]
    assert "".join(out.text for out in last.outputs) == "went on\n"
    assert (two_runs / "status").read_text() == "1"
    one, two = (two_runs / "printed").read_text().splitlines()
    assert one.startswith("one: succeeded on 2 rehearsal cores in ")
    assert two.startswith("two: failed on 2 rehearsal cores in ")


@pytest.mark.usefixtures("lent")
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


@pytest.mark.usefixtures("lent")
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


@pytest.mark.usefixtures("lent")
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
