"""Processes that use the TPU: real processes with device files of a fake machine."""

from __future__ import annotations

import fcntl
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.machine import FakeMachine
from tests.machine.machines import ids, look
from tpunb.machine import tpu_users

ME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def tpu(starts_processes: None, tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path, {"TPU_ACCELERATOR_TYPE": "v5litepod-8"}).chips("v5e", 8)


def test_nobody(tpu: FakeMachine) -> None:
    assert tpu_users.find_tpu_users(tpu.root) == []


def test_a_process_is_named_with_its_command_and_a_command_that_ends_it(tpu: FakeMachine) -> None:
    with tpu:
        process = tpu.hold("vfio/3")
        (one,) = tpu_users.find_tpu_users(tpu.root)
        found = look(tpu)
        assert (one.pid, one.kind, one.user) == (process.pid, "process", ME)
        assert one.command.startswith(sys.executable)
        assert ids(found)[0] == ["tpu-held"]
        assert f"process {process.pid} of {ME}" in found.problems[0].message
        assert found.problems[0].fix == f"`kill {process.pid}`"
        subprocess.run(["bash", "-c", found.problems[0].fix.strip("`")], check=True)  # the fix
        process.wait()
        assert look(tpu).problems == ()


def test_another_notebooks_kernel(tpu: FakeMachine) -> None:
    with tpu:
        process = tpu.hold("vfio/0", kernel="/home/me/other.ipynb")
        (one,) = tpu_users.find_tpu_users(tpu.root)
        assert (one.pid, one.kind, one.name) == (process.pid, "kernel", "other.ipynb")
        assert "the kernel of other.ipynb" in one.describe()
        assert "shut down that kernel" in one.fix()


def test_this_kernel(tpu: FakeMachine) -> None:
    with open(tpu.root / "dev/vfio/0"):
        (one,) = tpu_users.find_tpu_users(tpu.root)
    assert (one.pid, one.kind) == (os.getpid(), "own_kernel")
    assert "restart this kernel" in one.fix()


@pytest.mark.parametrize("living", [True, False])
def test_a_run_of_ours(tpu: FakeMachine, living: bool) -> None:
    run = tpu.root / "my runs/20261121-120000-digits"
    run.mkdir(parents=True)
    (run / "spec.json").write_text("{}")
    with tpu, open(run / "running.lock", "w") as lock:
        if living:
            fcntl.flock(lock, fcntl.LOCK_EX)
        process = tpu.hold("vfio/0", "vfio/1", run=run)
        (one,) = tpu_users.find_tpu_users(tpu.root)
        assert (one.pid, one.kind, one.name, one.living) == (process.pid, "run", str(run), living)
        found = look(tpu)
        if living:  # the next run waits for it: no problem to fix
            assert ids(found) == ([], ["tpu-in-use"])
            assert f"`tpunb stop {run.name} --runs '{run.parent}'`" in found.advice[0].fix
        else:
            assert ids(found)[0] == ["tpu-held"]
            assert "which has ended" in found.problems[0].message


def test_the_lock_that_libtpu_takes_names_its_holder(tpu: FakeMachine) -> None:
    with tpu:
        process = tpu.hold(lock=True)
        if not Path("/proc/locks").exists():
            pytest.skip("this sandbox does not list locks")
        assert [one.pid for one in tpu_users.find_tpu_users(tpu.root)] == [process.pid]


def test_a_lock_file_that_nobody_has_locked_is_harmless(tpu: FakeMachine) -> None:
    tpu.lock_file()
    assert look(tpu).problems == ()
