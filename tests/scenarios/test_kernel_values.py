"""What the kernel holds, in a run: in real kernels, under papermill, and as a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
from nbformat import v4

import tpunb
from tests.drivers.kernel import Kernel, Ran, kernel
from tpunb.runs.directory import RunDir, list_runs

pytestmark = pytest.mark.usefixtures("lent")

PRELUDE = """
import os, torch
torch.manual_seed(0)
lr = 0.01
config = {"width": 8, "loss": print}
x = torch.ones(4)
def scaled(value):
    return value * lr
"""
SHOW = "if os.environ['RANK'] == '0': print(lr, config['width'], scaled(100), x.sum().item())"


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("lab")) as made:
        made.run("%load_ext tpunb\n%tpu_setup --cores 2", "load").good()
        yield made


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "nb" in request.fixturenames:
        made: Kernel = request.getfixturevalue("nb")
        for name in ("train", "below", "loop"):
            made.cells.pop(name, None)
        made.run(PRELUDE, "prelude").good()


def train(nb: Kernel, source: str, options: str = "") -> Ran:
    return nb.run(f"%%tpu_train {options}\n{dedent(source).strip()}\n", "train")


def last(nb: Kernel) -> RunDir:
    return list_runs(nb.folder / "runs")[-1]


@pytest.mark.parametrize("options", ["", "--replicate"])
def test_kernel_values_changed_by_a_cell_below_reach_the_run(nb: Kernel, options: str) -> None:
    train(nb, "pass").good()
    nb.run("lr = 0.1; config['width'] = 16; x += 1", "below").good()
    ran = train(nb, SHOW, options).good()
    assert "[0] 0.1 16 10.0 4.0" in ran.stdout
    assert "lr: 0.1 from the kernel; cell [" in ran.status
    assert "config['width']: 16 from the kernel; cell [" in ran.status
    assert "changes `x`, which this run has as the cells above make it" in ran.status
    table = tpunb.runs(nb.folder / "runs")
    assert table.iloc[0]["params.lr"] == 0.1
    assert table.iloc[0]["params.config.width"] == 16
    written = json.loads(last(nb).result.read_text())["parameters"]
    assert written["lr"] == 0.1
    replayed = train(nb, SHOW, "--replay").good()
    assert "[0] 0.01 8 1.0 4.0" in replayed.stdout
    assert "kernel" not in replayed.stdout
    assert tpunb.runs(nb.folder / "runs").iloc[0]["params.lr"] == 0.01


@pytest.mark.parametrize("options", ["", "--replicate"])
def test_replay_of_cells_that_can_run_only_once(nb: Kernel, options: str) -> None:
    """Each finds what it found in the kernel, or its work done; the train cell finds neither."""
    name = f"ONCE{len(options)}"
    nb.run(f"# tpu: skip\nos.environ[{name!r}] = 'here'", "skipped").good()
    once = f"""
    import shutil
    from pathlib import Path
    folder, other = Path("once{len(options)}"), {name!r} + "_OTHER"
    %env FOO=1
    folder.mkdir()
    (folder / "file").write_text("text")
    for file in folder.glob("f*"):
        os.remove(file)
    def clean():
        os.rmdir(folder / "sub")
    os.mkdir(folder / "sub")
    clean()
    del os.environ["FOO"]
    found = os.environ.pop({name!r})
    """
    try:
        nb.run(dedent(once).strip(), "once").good()
        ran = train(nb, f"print(found, os.environ.get({name!r}), os.environ.get('FOO'))", options)
        assert "here None None" in ran.good().stdout
        again = train(nb, "os.mkdir(folder)", f"{options} --no-raise").good()
        assert "FileExistsError" in again.screen()
    finally:
        for id in ("skipped", "once"):
            nb.cells.pop(id, None)


def test_papermill_parameters_are_recorded_with_the_run(tmp_path: Path) -> None:
    """Those that ran, of `tpunb run -p` and of papermill itself."""
    tagged = v4.new_code_cell("lr = 0.002\nsteps = 3", metadata={"tags": ["parameters"]})
    sources = ("import torch", "%%tpu_train --cores 1\nprint('lr', lr)")
    rest = [v4.new_code_cell(source) for source in sources]
    cells = [v4.new_code_cell("%load_ext tpunb"), tagged, *rest]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "in.ipynb")
    parameters = ["-p", "lr", "0.1", "-p", "extra", "7"]
    tools = Path(sys.executable).parent
    for command in (
        [str(tools / "tpunb"), "run", "in.ipynb", "out.ipynb", *parameters[:3]],
        [
            *(str(tools / "papermill"), "in.ipynb", "out2.ipynb", *parameters),
            *("-k", "python3", "--language", "python", "--no-progress-bar"),
        ],
    ):
        subprocess.run(command, cwd=tmp_path, check=True, env=dict(os.environ), timeout=600)
    frame = tpunb.runs(tmp_path / "runs")
    assert frame["params.lr"].tolist() == [0.1, 0.1]
    assert frame["params.steps"].tolist() == [3, 3]
    assert frame["params.extra"].tolist()[0] == 7
