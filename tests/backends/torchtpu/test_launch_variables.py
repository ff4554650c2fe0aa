"""The variables of a launch, from a fake torch_tpu on a fake machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.fakes import torch_tpu
from tests.fakes.machine import FakeMachine
from tpunb.backends.torchtpu import launch_variables
from tpunb.machine import environment
from tpunb.utils.errors import SetupError

pytestmark = pytest.mark.usefixtures("starts_processes")

ADDRESSES, TOPOLOGY, SESSION = environment.LAUNCH_VARIABLES


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the fake torch_tpu is, which no rehearsed device of another test hides."""
    for name in [name for name in sys.modules if name.startswith(("torch_tpu", "torch.tpu"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("torch.tpu", raising=False)
    monkeypatch.syspath_prepend(torch_tpu.install(tmp_path / "packages"))
    return tmp_path / "packages"


def made(root: Path, chips: int = 8, **env: str) -> dict[str, str]:
    """The environment of a run on a TPU v5e with these chips."""
    return FakeMachine(root / "machine", env).chips("v5e", chips).env


def test_the_ranks_of_one_host(tmp_path: Path) -> None:
    found = launch_variables.launch_environment(made(tmp_path), 4)
    assert found.keys() == set(environment.LAUNCH_VARIABLES)
    assert found[TOPOLOGY] == "2,2,1"
    assert len(set(found[ADDRESSES].split(","))) == 4
    again = launch_variables.launch_environment(made(tmp_path / "again"), 4)
    assert again[SESSION] != found[SESSION]  # a process of its own for every run
    assert SESSION not in os.environ


def test_variables_that_are_set_stay(tmp_path: Path) -> None:
    env = made(tmp_path, **{TOPOLOGY: "4,4,1"})
    assert launch_variables.launch_environment(env, 4).keys() == {ADDRESSES, SESSION}


@pytest.mark.parametrize(
    "env", [{"JOB_COMPLETION_INDEX": "0"}, {"TPU_WORKER_HOSTNAMES": "h0,h1", "NODE_RANK": "0"}]
)
def test_a_run_on_one_host_of_a_cluster_has_its_own_addresses(
    env: dict[str, str], tmp_path: Path
) -> None:
    found = launch_variables.launch_environment(made(tmp_path, **env), 1)
    assert found[ADDRESSES].startswith("localhost:")
    assert found[TOPOLOGY] == "1,1,1"


def test_the_ranks_of_several_hosts_have_the_same_addresses(tmp_path: Path) -> None:
    hosts = ["10.0.0.2", "10.0.0.3"]
    found = [
        launch_variables.launch_environment(made(tmp_path / str(node), 4), 4, node, hosts)
        for node in (0, 1)
    ]
    one, other = (each[ADDRESSES].split(",") for each in found)
    assert one == other
    assert [address.split(":")[0] for address in one] == ["10.0.0.2"] * 4 + ["10.0.0.3"] * 4
    assert found[0].keys() == set(environment.LAUNCH_VARIABLES)  # elastic's are its own


@pytest.mark.parametrize(
    ("chips", "ranks", "words"),
    [(0, 4, "expected TPU devices, got none"), (8, 3, "No TPU topology found for count: 3")],
)
def test_what_torch_tpu_refuses(chips: int, ranks: int, words: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=words) as caught:
        launch_variables.launch_environment(made(tmp_path, chips), ranks)
    assert str(caught.value).startswith(f"torch_tpu cannot start {ranks} ranks on this host: ")


FATAL = "F0000 00:00:1.2 7 registration.cc:19] Check failed: is OK (NOT_FOUND: TPU_LIBRARY_PATH"
ABORT = f"import os, sys; print({FATAL!r}, '=== Trace ===', sep='\\n', file=sys.stderr, flush=True)"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (f"{ABORT}; os.abort()", rf"ended by SIGABRT: {FATAL[:30]}.*TPU_LIBRARY_PATH"),
        ("raise ImportError('libtpu')", r"ended with 1: ImportError: libtpu"),
    ],
)
def test_a_torch_tpu_that_cannot_be_loaded(
    code: str, words: str, tmp_path: Path, packages: Path
) -> None:
    env = made(tmp_path)
    torch_tpu.install(packages, code)
    with pytest.raises(SetupError, match=words.replace("]", r"\]")):
        launch_variables.launch_environment(env, 4)


def test_a_torch_tpu_that_does_not_return(
    tmp_path: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = made(tmp_path)
    torch_tpu.install(packages, "import threading; threading.Event().wait()")
    monkeypatch.setattr(launch_variables, "PATIENCE", 1.0)
    with pytest.raises(SetupError, match="did not return within 1 s"):
        launch_variables.launch_environment(env, 4)
