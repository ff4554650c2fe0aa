"""Exported scripts, run where tpunb is not installed: alone, and as two ranks of one host."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import tpunb
from tests.notebook.convert.notebooks import WITHOUT_TPUNB, lines_of, notebook
from tpunb.notebook.convert.convert import convert
from tpunb.notebook.convert.export import functions
from tpunb.notebook.models import Export, Need, Script


def exported(*sources: str, setup: bool = True) -> Script:
    export = Export.WITH_SETUP if setup else Export.WITHOUT_SETUP
    return convert(notebook(*sources, train=None), export=export)


class Ranks:
    """Runs a script in an empty folder, as `python` does (one rank) or as torchrun does."""

    def __init__(self, folder: Path) -> None:
        self.work, self.temporary = folder / "work", folder / "tmp"
        self.work.mkdir()
        self.temporary.mkdir()
        self._script = folder / "script.py"

    def run(
        self, script: Script, count: int, python: str = sys.executable, **env: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """What each rank printed, and how it ended."""
        self._script.write_text(script.text, encoding="utf-8")
        started = []
        for rank in range(count):
            own = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
            process = subprocess.Popen(
                [python, "-c", WITHOUT_TPUNB, str(self._script)],
                cwd=self.work,
                env={**os.environ, **(own if count > 1 else {}), "TMPDIR": str(self.temporary)}
                | env,
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
    assert list(ranks.temporary.iterdir()) == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_command_that_fails_is_reported_once_and_the_script_goes_on(
    ranks: Ranks, count: int
) -> None:
    ended = ranks.run(exported("!exit 3", "print('on')"), count)
    assert [(done.returncode, done.stdout) for done in ended] == [(0, "on\n")] * count
    (error,) = [done.stderr for done in ended if done.stderr]
    assert "_tpunb_setup_shell('exit 3'): ended with status 3" in error


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("!pip install --no-index --quiet no-such-package-here", "the installation ended with"),
        (
            "%%bash\nexit 4",
            "CalledProcessError: Command '['bash']' returned non-zero exit status 4",
        ),
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


def test_secrets_are_read_from_the_environment_and_asked_for_before_anything_runs(
    ranks: Ranks,
) -> None:
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
    assert refused.stderr.splitlines()[-1].endswith("Set before the start: A_TOKEN, COOKIE")
    assert not (ranks.work / "began").exists()
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
        "cores = 2", "!pip install tpunb\n%env PJRT_DEVICE=CPU", "import torch\n!ls", "!ls"
    )
    assert lines_of(script, 1)[1].endswith("; _tpunb_prepare(_tpunb_instead)")
    assert script.text.count("_tpunb_prepare(_tpunb_instead)") == 1
    above = exported("import torch\n!ls")
    assert "_tpunb_prepare(_tpunb_instead)" not in "\n".join(lines_of(above, 0))
    assert above.text.count("\n_tpunb_prepare(_tpunb_instead)\n") == 1


def test_a_script_has_of_tpunb_what_it_uses(ranks: Ranks) -> None:
    script = exported(
        "import tpunb as t\nfrom tpunb import track",
        "for step in track([3, 4]):\n    t.log(step, loss=0.25, seen=12345)\nt.load\nt.plot",
    )
    assert "_tpunb_save" not in script.text
    (done,) = ranks.run(script, 1)
    assert done.stdout == "step 3 · loss 0.25 · seen 12345\nstep 4 · loss 0.25 · seen 12345\n"
    assert "tpunb.plot needs tpunb, which is not installed here: pip install tpunb" in done.stderr
    first, second = ranks.run(script, 2)
    assert first.stdout.startswith("step 3")
    assert second.stdout == ""


def test_what_has_no_stand_in_is_told_at_once(ranks: Ranks) -> None:
    script = exported("print('began')", "from tpunb.training import shard")
    assert [str(need) for need in script.requirements] == [
        "cell [2], line 1: needs tpunb (tpunb.training): pip install tpunb"
    ]
    (done,) = ranks.run(script, 1)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cell [2] needs tpunb.training" in done.stderr


def test_a_script_without_setup_lines_and_tpunb_has_none_of_it() -> None:
    script = exported("x = 1", "print(x)")
    for name in ("_tpunb_setup", "_tpunb_log", "_tpunb_launch", "_tpunb_stand_in"):
        assert name not in script.text


def made_stand_in() -> types.SimpleNamespace:
    """What a script of its own has instead of tpunb."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(functions("_tpunb_save _tpunb_load"), names)
    return types.SimpleNamespace(save=names["_tpunb_save"], load=names["_tpunb_load"])


def test_checkpoints_are_those_of_tpunb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    stand_in = made_stand_in()
    assert stand_in.load() is None
    for step in range(5):
        stand_in.save({"w": torch.full((2,), float(step))}, step)
    assert len(list(Path("checkpoints").glob("*.pt"))) == 3
    found = tpunb.load()
    assert found is not None
    assert (found.step, found["w"].tolist()) == (4, [4.0, 4.0])
    tpunb.save({"w": torch.zeros(1)}, 9)
    state, step = stand_in.load()
    assert (step, state["w"].tolist()) == (9, [0.0])
    assert stand_in.load(step=3)["w"].tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="no complete checkpoint of step 77"):
        stand_in.load(step=77)


def test_each_rank_saves_and_loads_its_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in, other = made_stand_in(), made_stand_in()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    stand_in.save({"rank": 1}, 5, per_rank=True, path=tmp_path)
    assert stand_in.load(tmp_path) is None  # the part of rank 0 is missing
    monkeypatch.setenv("RANK", "0")
    other.save({"rank": 0}, 5, per_rank=True, path=tmp_path)
    assert stand_in.load(tmp_path)["rank"] == 0
    assert stand_in.load(tmp_path, rank=1)["rank"] == 1
    found = tpunb.load(tmp_path, step=5, rank=1)
    assert found is not None
    assert found["rank"] == 1


def test_a_rank_that_comes_early_makes_no_checkpoint_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = [made_stand_in(), made_stand_in()]
    for rank in (1, 0):  # the saves of rank 1 write nothing until the last
        monkeypatch.setenv("RANK", str(rank))
        for step in range(5):
            ranks[rank].save("all", step, path=tmp_path)
        ranks[rank].save(f"of {rank}", 100, per_rank=True, path=tmp_path)
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        assert ranks[rank].load(tmp_path).state == f"of {rank}"
    assert len(list(tmp_path.iterdir())) == 4  # two parts, and two before them


ON_A_TPU = """
import os, torch.distributed as dist, torch_xla
os.environ.update(PJRT_DEVICE="TPU", RANK="6", WORLD_SIZE="8")
# This machine has none: what torch would do on one is only recorded.
dist.init_process_group = lambda *args, **kwargs: print("joined", args, kwargs)
dist.destroy_process_group = lambda: print("left")
_tpunb_launch_here()
import torch_xla.distributed.xla_multiprocessing as xmp
torch_xla.launch(lambda *args: print(args), args=("a",))
xmp.spawn(lambda *args: print(args), args=("b",), nprocs=8, start_method="fork")
"""


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


def test_a_call_of_launch_gets_its_keyword_arguments(ranks: Ranks) -> None:
    call = "print(tpunb.launch(f, (1,), {'b': 2}, cores=2, on_log=print).value)"
    [ended] = ranks.run(exported("import tpunb\ndef f(a, b):\n    return a, b", call), 1)
    assert (ended.stdout, ended.returncode) == ("(1, 2)\n", 0), ended.stderr
