"""More of tests/scenarios/test_values_flow.py, which takes longer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import nbformat
import papermill
import pytest
from nbclient import NotebookClient
from nbformat import v4

from tests.drivers.kernel import ROOT, Kernel, until
from tests.scenarios.test_values_flow import ADD, SHOW, THREE, cell, ends, nb, shared
from tpunb.runs.directory import list_runs


def test_last_run_in_a_run_is_that_of_its_place_in_the_notebook(nb: Kernel) -> None:
    first = cell(nb, ADD.format(" --name one", 1), "one").good()
    cell(nb, "where = str(tpunb.last_run.dir)", "where").good()
    cell(nb, ADD.format(" --name two", 1), "two").good()
    shown = cell(nb, "%%tpu_train\nprint('dirs', where, tpunb.last_run.dir)", "show").good()
    assert "-one" in first.screen()
    assert re.search(r"dirs \S+-one\S* \S+-two\n", shown.printed())


def test_returned_values_do_not_reach_a_train_cell_above(nb: Kernel) -> None:
    cell(nb, ADD.format("", 1), "one").good()
    two = ADD.format("", 10)
    cell(nb, two, "two").good()
    assert nb.value("model.weight.tolist()") == [11.0, 11.0]
    cell(nb, two, "two").good()
    assert nb.value("model.weight.tolist()") == [11.0, 11.0]
    cell(nb, ADD.format("", 2), "one").good()
    assert nb.value("model.weight.tolist()") == [2.0, 2.0]
    assert "weight 11.0 11.0" in cell(nb, SHOW, "below").good().printed()


def test_returned_values_stay_after_a_failed_rerun(nb: Kernel) -> None:
    cell(nb, ADD.format(",n --out res\nn = 5", 1), "one").good()
    failed = cell(nb, ADD.format(",n --out res\nn = 6\n1 / 0", 1), "one")
    assert "ZeroDivisionError" in failed.red_line
    shown = cell(nb, "%%tpu_train\nprint(n, *model.weight.tolist(), res.state)", "show").good()
    assert "5 1.0 1.0 failed" in shown.printed()  # as in the kernel
    assert nb.value("n, res.state == 'failed'") == (5, True)


def test_background_handle_is_usable_in_later_runs_after_its_end(nb: Kernel) -> None:
    waits = "while not os.path.exists('go on'): time.sleep(0.05)\nb = 7"
    cell(nb, f"%%tpu_train --bg --returns b --out h\n{waits}", "one").good()
    assert cell(nb, "", "wait").good()
    refused = cell(nb, "%%tpu_train\nprint(h.state)", "two").traceback
    assert "still running in the background: wait for it with `h.wait()`" in refused
    nb.run("pathlib.Path('go on').touch()", "go").good()
    until(lambda: nb.value("h.state == 'succeeded'"), "the run ends")
    shown = cell(nb, "%%tpu_train\nprint(h.state, h.result.returns['b'])", "two").good()
    assert "succeeded 7" in shown.printed()
    refused = cell(nb, "%%tpu_train\nprint(b)", "two").traceback
    assert "was never waited for: call `h.wait()`" in refused
    cell(nb, "m = h.wait().returns['b'] + 1", "wait").good()
    assert "7 8" in cell(nb, "%%tpu_train\nprint(b, m)", "two").good().printed()


def test_detached_run_returns_are_available_after_attach(nb: Kernel) -> None:
    cell(nb, "%%tpu_train --detach --returns k\nk = 3", "one").good()
    assert cell(nb, "", "attach").good()
    [run] = [run for run in list_runs(nb.folder / "runs") if run.read_spec().returns == ("k",)]
    refused = cell(nb, "%%tpu_train\nprint(k)", "two").traceback
    assert f"whose run is detached: run `%tpu_attach {run.id}`" in refused
    cell(nb, f"%tpu_attach {run.id} --out r\nprint(k)", "attach").good()
    shown = cell(nb, "%%tpu_train\nprint(k, r.returns, r.state)", "two").good()
    assert "3 {'k': 3} succeeded" in shown.printed()


@pytest.mark.usefixtures("starts_processes")
def test_train_cells_give_equal_numbers_in_nbclient_papermill_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "three.ipynb"
    notebook = v4.new_notebook(cells=[v4.new_code_cell(dedent(source).strip()) for source in THREE])
    nbformat.write(notebook, path)
    nbformat.write(notebook, tmp_path / "other.ipynb")
    seen: dict[str, set[str]] = {}

    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    seen["nbclient"] = ends(nbformat.writes(notebook))

    done = papermill.execute_notebook(
        str(tmp_path / "other.ipynb"), None, cwd=str(tmp_path), kernel_name="python3"
    )
    seen["papermill"] = ends(nbformat.writes(done))

    tpunb = [sys.executable, "-m", "tpunb", "convert", str(path), "-o", str(tmp_path / "script.py")]
    subprocess.run(tpunb, check=True)
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*torchrun, "--standalone", str(tmp_path / "script.py")],
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    seen["torchrun"] = ends(ran.stdout)

    [numbers] = seen["nbclient"]
    assert seen == {how: {numbers} for how in ("nbclient", "papermill", "torchrun")}
    before, after, *_ = map(float, numbers.split())
    assert before < 0.6 < after
