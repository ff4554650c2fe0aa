"""A notebook that uses SPMD, in a real kernel: what is seen, chosen and refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.drivers.kernel import Kernel, kernel
from tpunb.runs.directory import list_runs

pytestmark = pytest.mark.usefixtures("lent")

SETUP = """
import os
import numpy as np
import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
"""
SPMD = """xr.use_spmd()
cores = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(cores), (cores,), ('data',))
x = torch.arange(8.).to('xla')
wrapped = xs.mark_sharding(x, mesh, ('data',))
total = (x * 2).sum()
print(cores, total.item())"""
# DTensors of which this process has all.
SAVE = """
import tpunb
tpunb.save({'x': wrapped, 'twice': wrapped * 2}, 1)
print(tpunb.load().state['twice'].tolist())"""
ONE = "SPMD: one process drives all"


@pytest.fixture(scope="module")
def nb(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("spmd"), file=None) as made:
        made.run("%load_ext tpunb").good()
        made.run(SETUP.strip()).good()
        yield made


def test_spmd_train_cell_runs_one_process_on_all_cores(nb: Kernel) -> None:
    ran = nb.run(f"%%tpu_train --cores 3 --returns x,total\n{SPMD}{SAVE}").good()
    assert f"{ONE} 3 rehearsal cores (cell [{ran.number}] calls use_spmd())" in ran.status
    assert "[0] 3 56.0" in ran.stdout
    assert "[0] [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]" in ran.stdout
    assert ran.status.startswith("succeeded · 1 rank · SPMD on 3 rehearsal cores · ")
    assert ran.shown.startswith("RunResult succeeded on 3 rehearsal cores (SPMD) after ")
    assert nb.value("type(x) is torch.Tensor, x.tolist(), total.item()") == (
        True,
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
        56.0,
    )
    result = json.loads(list_runs(nb.folder / "runs")[-1].result.read_text())
    assert (result["world_size"], result["spmd"], result["device"]) == (1, 3, "CPU")


def test_spmd_variable_switches_it_on_or_off(nb: Kernel) -> None:
    asked = nb.run("%%tpu_train --cores 2 --env XLA_USE_SPMD=1\nexec('n = xr.is_spmd()'); print(n)")
    assert f"{ONE} 2 rehearsal cores (--env XLA_USE_SPMD=1)" in asked.good().status
    assert "[0] True" in asked.stdout
    refused = nb.run(f"%%tpu_train --cores 2 --env XLA_USE_SPMD=0 --no-raise\n{SPMD}").good()
    assert "SpmdError: SPMD needs one process that drives all cores, but this is one of 2" in (
        refused.shown
    )


def test_spmd_in_an_executed_script_needs_the_line_of_the_error(nb: Kernel) -> None:
    (nb.folder / "sharded.py").write_text(SETUP + SPMD)
    cell = "import runpy\nrunpy.run_path('sharded.py')"
    refused = nb.run(f"%%tpu_train --cores 2 --no-raise\n{cell}").good().shown
    assert "this is one of 2 processes" in refused
    line = re.search(r"begin the train cell with `(.+?)`", refused.replace("\n", " "))
    assert line
    ran = nb.run(f"%%tpu_train --cores 2\n{line[1]}\n{cell}").good()
    assert "[0] 2 56.0" in ran.stdout


def test_spmd_in_a_debug_cell_does_not_affect_later_runs(nb: Kernel) -> None:
    """One device in the kernel, so a mesh of one."""
    assert nb.run(f"%%tpu_debug\n{SPMD}").good().stdout.endswith("1 56.0\n")
    assert nb.value("os.environ['XLA_USE_SPMD']") == "1"
    ranks = nb.run("%%tpu_train --cores 2\nprint(xr.is_spmd(), xr.world_size())").good()
    lines = ranks.stdout.splitlines()  # equal ones are folded if they come together
    assert "[0-1] False 2" in lines or {"[0] False 2", "[1] False 2"} <= set(lines)
    assert ONE not in ranks.status
    again = nb.run(f"%%tpu_train --cores 2\n{SPMD}").good()
    assert "[0] 2 56.0" in again.stdout
    assert "XLA_USE_SPMD is being deprecated" not in again.stdout
    assert nb.run("%%tpu_debug\nprint(xr.is_spmd(), (x + 1).sum().item())").good().stdout == (
        "True 36.0\n"
    )
