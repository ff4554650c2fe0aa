"""More of tests/scenarios/test_launch.py, which takes longer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drivers.kernel import Kernel
from tests.scenarios.test_launch import cell, last_run, nb
from tpunb.cli import main


def test_launch_cells_are_left_out_of_other_runs(nb: Kernel) -> None:
    cell(
        nb,
        """
        def one(x):
            return x
        def sweep(*xs):
            return [tpunb.launch(one, (x,), cores=1, ranks="none").returns["value"] for x in xs]
        """,
        "above",
    ).good()
    cell(nb, "base = 3\nfound = sweep(1, 2)", "sweep").good()
    assert nb.value("found") == [1, 2]
    ran = cell(nb, "%%tpu_train --cores 1\nprint('base', base, 'found', found)").good()
    assert "[0] base 3 found [1, 2]" in ran.stdout
    assert len(ran.statuses()) == 1
    cell(nb, "pass", "sweep").good()


def test_launch_results_are_available_in_later_runs(nb: Kernel) -> None:
    cell(
        nb,
        """
        def pretrain(rate):
            return {"w": torch.full((2,), rate)}
        results = []
        first = tpunb.launch(pretrain, (0.5,), cores=1)
        for rate in (1.0, 2.0):
            results.append(tpunb.launch(pretrain, (rate,), cores=1))
        weights = tpunb.launch(pretrain, (4.0,), cores=1).value
        """,
        "above",
    ).good()
    cell(nb, "w = first.returns['value']['w']\nprint(first)", "sweep").good()
    ran = cell(
        nb,
        """
        def finetune():
            sums = [result.value["w"].sum().item() for result in results]
            return w.tolist(), sums, weights["w"].tolist(), rate
        again = tpunb.launch(finetune, cores=2)
        print(again.value)
        """,
    ).good()
    assert "([0.5, 0.5], [2.0, 4.0], [4.0, 4.0], 2.0)" in ran.stdout
    rates = nb.value("tpunb.runs()['params.rate'].dropna().tolist()")
    assert rates[:5] == [2.0, 4.0, 2.0, 1.0, 0.5]  # the newest one reads the notebook's own
    cell(nb, "pass", "above").good()
    cell(nb, "pass", "sweep").good()


def test_launch_in_a_debug_or_train_cell_calls_the_function(nb: Kernel) -> None:
    cell(nb, "def core():\n    return int(os.environ.get('RANK', -1))", "above").good()
    ran = cell(nb, "%%tpu_debug --no-report\nhere = tpunb.launch(core).returns['value']").good()
    assert nb.value("here") == -1
    assert ran.statuses() == []
    ran = cell(
        nb,
        """
        %%tpu_train --cores 2
        print("got", tpunb.launch(core, cores=4).value)
        """,
    ).good()
    assert sorted(re.findall(r"\[(\d)\] got \1", ran.stdout)) == ["0", "1"]
    assert ran.stdout.count("cores=4 is ignored: 2 ranks run") == 1


def test_launch_is_recorded_in_the_run_folder(nb: Kernel) -> None:
    cell(nb, "def plus(a, b=1):\n    return a + b\ntpunb.launch(plus, (1,), cores=1)").good()
    snapshot = json.loads(last_run(nb).snapshot.read_text(encoding="utf-8"))
    assert snapshot["cells"][snapshot["train"]]["source"].strip() == "value = plus(1)"


@pytest.mark.usefixtures("starts_processes")
def test_launch_in_an_exported_script_runs_on_every_rank(nb: Kernel) -> None:
    cell(
        nb,
        """
        def whoami(folder):
            import torch_xla.runtime as xr
            rank = xr.global_ordinal()
            open(f"{folder}/{rank}.txt", "a").write(f"{xr.world_size()} ")
            return rank
        """,
        "above",
    ).good()
    folder = nb.folder / "out"
    folder.mkdir()
    launching = f"""
        for turn in range(2):
            result = tpunb.launch(whoami, args=({str(folder)!r},), cores=2)
        print("of rank", result.value, result.state)
        """
    assert "of rank 0 succeeded" in cell(nb, launching).good().stdout
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "0.txt": "2 2 ",
        "1.txt": "2 2 ",
    }
    script = nb.folder / "script.py"
    assert nb.path is not None
    assert main(["convert", "--cell", "cell", "-o", str(script), str(nb.path)]) == 0
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    command = [*("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script))]
    done = subprocess.run(
        [sys.executable, *command],
        env={**env, "PYTHONPATH": str(Path.cwd())},
        cwd=nb.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"of rank (\d) succeeded", done.stdout) == ["0", "0"]  # what rank 0 returned
    assert (folder / "1.txt").read_text() == "2 2 2 2 "
