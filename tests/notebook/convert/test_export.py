"""Exported scripts, run where tpunb is not installed: alone, and as two ranks of one host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook.convert.notebooks import WITHOUT_TPUNB, lines_of, notebook
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.models import Export, Need, Script


def exported(*sources: str, setup: bool = True, train: int | None = None) -> Script:
    export = Export.WITH_SETUP if setup else Export.WITHOUT_SETUP
    return convert(notebook(*sources, train=train), export=export)


class Ranks:
    """Runs a script in an empty folder, as `python` does (one rank) or as torchrun does."""

    def __init__(self, folder: Path) -> None:
        self.work, self._folder, self._starts = folder / "work", folder / "torchrun", 0
        self.work.mkdir()
        self._script = folder / "script.py"

    def run(
        self, script: Script, count: int, python: str = sys.executable, **env: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """What each rank printed, and how it ended."""
        self._script.write_text(script.text, encoding="utf-8")
        self._starts += 1
        started = []
        for rank in range(count):
            own = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            folder = self._folder / str(self._starts) / str(rank)
            folder.mkdir(parents=True)
            own["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            process = subprocess.Popen(
                [python, "-c", WITHOUT_TPUNB, str(self._script)],
                cwd=self.work,
                env={**os.environ, **(own if count > 1 else {})} | env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            started.append(process)
        ended = []
        for process in started:
            out, err = process.communicate(timeout=120)
            ended.append(subprocess.CompletedProcess([], process.returncode, out, err))
        return ended

    def text(self, name: str) -> str:
        return (self.work / name).read_text(encoding="utf-8")


@pytest.fixture
def ranks(starts_processes: None, tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


ONCE = (
    "%env GREETING=hello\n!echo $GREETING >> said.txt",
    "%%writefile made.py\ndef f():\n    return 'made'",
    "import os\nimport made\nstamp = !date +%N; echo $RANK$WORLD_SIZE$LOCAL_WORLD_SIZE.",
    "for i in range(2):\n    !echo {i} >> said.txt",
    "%%bash --out seen\necho bash >> said.txt\ncat said.txt",
    "%mkdir sub\n%cd sub",
    "if os.environ.get('RANK') == '1':\n    !echo only rank 1 >> ../said.txt",
    "print(made.f(), os.environ['GREETING'], os.path.basename(os.getcwd()), stamp.s, repr(seen))",
)


@pytest.mark.parametrize("count", [1, 2])
def test_setup_lines_run_once_on_a_host_and_all_ranks_go_on_with_the_result(
    ranks: Ranks, count: int
) -> None:
    ended = ranks.run(exported(*ONCE), count)
    assert [done.returncode for done in ended] == [0] * count, ended
    assert len({done.stdout.splitlines()[-1] for done in ended}) == 1
    values = ended[0].stdout.splitlines()[-1].split(maxsplit=4)
    assert values[:3] == ["made", "hello", "sub"]
    assert values[3].isdigit()
    assert values[4] == ". " + repr("hello\n0\n1\nbash\n")  # a command is no rank
    rank_1 = "only rank 1\n" if count > 1 else ""
    assert ranks.text("said.txt") == f"hello\n0\n1\nbash\n{rank_1}"


@pytest.mark.parametrize("count", [1, 2])
def test_a_command_that_fails_is_reported_once_and_the_script_goes_on(
    ranks: Ranks, count: int
) -> None:
    ended = ranks.run(exported("!exit 3", "print('on')"), count)
    assert [(done.returncode, done.stdout) for done in ended] == [(0, "on\n")] * count
    (error,) = [done.stderr for done in ended if done.stderr]
    assert error.endswith(": ended with status 3\n")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("!pip install --no-index --quiet no-such-package-here", "returned non-zero exit status"),
        ("%%bash\nexit 4", "returned non-zero exit status 4"),
        ("%%writefile no/such/folder.txt\nx", "No such file or directory: 'no/such/folder.txt'"),
        ("%%script no-such-program\nx", "No such file or directory: 'no-such-program'"),
    ],
)
def test_what_nothing_works_without_ends_every_rank(
    ranks: Ranks, source: str, message: str, count: int
) -> None:
    ended = ranks.run(exported(source, "print('on')"), count)
    assert [(done.returncode, done.stdout) for done in ended] == [(1, "")] * count
    assert all(message in done.stderr for done in ended), ended


def test_secrets_are_read_from_the_environment(ranks: Ranks) -> None:
    script = exported(
        "!touch began\n%env A_TOKEN=geh eim",
        '!echo "Cookie: q\'1" $A_TOKEN > said.txt',
        "!echo --token xyz >> said.txt",
        "if False:\n    !x --password pqr",
    )
    for secret in ("geh", "q'1", "xyz", "pqr"):
        assert secret not in script.text
    named = [need.name for need in script.requirements if need.need is Need.SECRET]
    assert named == ["A_TOKEN", "COOKIE", "TOKEN", "PASSWORD"]
    (refused,) = ranks.run(script, 1, TOKEN="t")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].endswith("not in this script: export A_TOKEN=…")
    (done,) = ranks.run(script, 1, A_TOKEN="my own", COOKIE="a 'b' \"c\" $HOME", TOKEN="t u")
    assert done.returncode == 0, done.stderr
    assert ranks.text("said.txt") == "Cookie: a 'b' \"c\" $HOME my own\n--token t u\n"


def test_two_secrets_have_two_variables() -> None:
    script = exported("!x --token a1b2", "!y --token c3d4", "!z --token a1b2")
    shown = [lines_of(script, index)[0] for index in range(3)]
    assert [line.count("'TOKEN_2'") for line in shown] == [0, 1, 0]
    script = exported("!x --token e5 --token f6 {n}", "%%bash\nx --token g7\ny --token h8")
    assert (
        lines_of(script, 0)[0].count("'TOKEN') + ' --token ' + _tpunb_setup_secret('TOKEN_2'") == 2
    )
    variables = [need.name for need in script.requirements]
    assert len(set(variables)) == 4
    for line, variable in zip(lines_of(script, 1)[1:], variables[2:], strict=True):
        assert f"_tpunb_setup_secret('{variable}')" in line


def test_without_setup_its_lines_are_comments() -> None:
    script = exported("!pip install x\n%env A_TOKEN=geheim", "%%writefile m.py\nx = 1", setup=False)
    assert "_setup" not in script.text
    assert "geheim" not in script.text
    assert lines_of(script, 1)[1] == "# | x = 1"


def test_lines_of_the_script_are_those_of_the_cells() -> None:
    script = exported("%%bash\na\nb", "x = 1\n!y\nz = 2")
    block, line = script.locate(script.text.split("\n").index("z = 2") + 1) or pytest.fail("none")
    assert (block.cell, line) == (1, 3)


def test_it_prepares_itself_below_what_it_needs_for_that() -> None:
    script = exported(
        "cores = 2", "!pip install tpunb\n%env PJRT_DEVICE=CPU", "import tpunb, torch\n!ls", "!ls"
    )
    assert lines_of(script, 1)[1].endswith("; _tpunb_prepare()")
    assert script.text.count("_tpunb_prepare()") == 1
    assert exported("import tpunb\n!ls").text.count("\n_tpunb_prepare()\n") == 1


def test_it_imports_tpunb_only_where_the_notebook_does(ranks: Ranks) -> None:
    cells = "x = 1", "!true", "import torch", "%%tpu_train\nx"
    plain = exported(*cells, "%%tpu_train --returns x\nprint(x)", train=-1)
    assert "tpunb.worker" not in plain.text
    (done,) = ranks.run(plain, 1)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
    for cell in ("from tpunb import log", "%%writefile m.py\nimport os, tpunb"):
        script = exported(cell, "x = 1")
        assert "# - tpunb: pip install tpunb" in script.text.split("\n")
        (failed,) = ranks.run(script, 1)
        assert "tpunb" in failed.stderr.splitlines()[-1]
    handed_on = exported("%%tpu_train --returns w\nw = 1", "%%tpu_train\nprint(w)")
    assert "# - tpunb: pip install tpunb" in handed_on.text


@pytest.mark.parametrize("module", ["torch.distributed", "torch_xla"])
def test_a_person_can_read_the_header(module: str) -> None:
    lines = "!pip install x\n%env A=b\n!echo $A\n%cd sub", "%%writefile m.py\nx = 1"
    assert exported(*lines, f"import {module}").blocks[0].last <= 120
    assert exported(f"import {module}").blocks[0].last < 40


GROUP = (
    "import os\nlocal_rank = int(os.environ['LOCAL_RANK'])\n!echo setup",
    "import sys\nimport torch.distributed as dist\nimport torch\n{module}",
    "%%tpu_train\ndist.init_process_group({group})\nassert dist.get_world_size() == 1",
    "%%tpu_train\ndist.init_process_group({group})\nx = torch.ones(1, device={device!r})\n"
    "dist.all_reduce(x)\nprint(x.item(), dist.get_rank(), local_rank, flush=True)\n"
    "sys.stdin.read()",
)
ALONE = ["-c", WITHOUT_TPUNB]
XLA = "import torch_xla.distributed.xla_backend"


@pytest.mark.usefixtures("starts_processes")
@pytest.mark.parametrize(
    ("start", "module", "group", "device"),
    [
        ([], "", "", "cpu"),
        (ALONE, "", '"gloo", init_method="env://"', "cpu"),
        ([], XLA, '"xla"', "xla"),
        (ALONE, XLA, '"xla", init_method="xla://"', "xla"),
    ],
)
def test_python_runs_a_script_as_the_one_rank_of_its_process_group(
    start: list[str], module: str, group: str, device: str, tmp_path: Path
) -> None:
    cells = [cell.format(module=module, group=group, device=device) for cell in GROUP]
    path = tmp_path / "script.py"
    script = convert(notebook(*cells), export=Export.WITH_SETUP)
    path.write_text(script.text, encoding="utf-8")
    both = [  # both groups exist at the same time
        subprocess.Popen(
            [sys.executable, *start, str(path)],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    lines = [next((line for line in each.stdout or () if line[:1] == "1"), "") for each in both]
    ended = [each.communicate(timeout=120) for each in both]
    assert [each.returncode for each in both] == [0, 0], ended
    assert lines == ["1.0 0 0\n"] * 2
