"""Which backend a run has, by what was asked for, what the code names, and what is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fakes import torch_tpu
from tpunb.backends import choice
from tpunb.backends.choice import (
    Installed,
    NamedBackend,
    choose,
    find_installed,
    require_one_host,
)
from tpunb.backends.torchtpu import loading
from tpunb.runs.spec import BackendName
from tpunb.utils.errors import MissingPackageError, SetupError

XLA = Installed((2, 9), torch_xla=True, torch_tpu=False)
NEW = Installed((2, 13), torch_xla=False, torch_tpu=False)
TPU = Installed((2, 13), torch_xla=False, torch_tpu=True)
OLD = Installed((2, 9), torch_xla=False, torch_tpu=False)
BOTH = Installed((2, 13), torch_xla=True, torch_tpu=False)
NOTHING = Installed((), torch_xla=False, torch_tpu=False)

SURE, MAYBE = NamedBackend("cell [2] has `it`", True), NamedBackend("cell [3] has `it`", False)


@pytest.mark.parametrize(
    ("named", "installed", "backend", "why"),
    [
        ({}, XLA, "xla", "torch_xla is installed"),
        ({}, NEW, "torch", "torch_xla is not installed"),
        ({}, TPU, "torchtpu", "torch_tpu is installed"),
        ({}, BOTH, "torch", "torch_xla does not fit this torch"),
        ({"xla": MAYBE, "torchtpu": MAYBE}, BOTH, "torchtpu", "cell [3]"),
        ({"xla": SURE}, NEW, "xla", "cell [2]"),
        ({"torchtpu": SURE, "torch": SURE}, NEW, "torchtpu", "cell [2]"),
        # Code for both, or with a fallback: what is installed decides.
        ({"xla": SURE, "torchtpu": SURE}, XLA, "xla", "cell [2]"),
        ({"xla": SURE, "torchtpu": SURE}, NEW, "torchtpu", "cell [2]"),
        ({"xla": MAYBE, "torch": SURE}, XLA, "xla", "cell [3]"),
        ({"xla": MAYBE, "torchtpu": SURE}, XLA, "torchtpu", "cell [2]"),
        ({"torchtpu": MAYBE}, XLA, "xla", "torch_xla is installed"),
        ({"torchtpu": MAYBE}, NEW, "torchtpu", "cell [3]"),
    ],
)
def test_the_code_decides_then_what_is_installed(
    named: dict[BackendName, NamedBackend], installed: Installed, backend: BackendName, why: str
) -> None:
    choice = choose(None, named, installed)
    assert choice.backend == backend
    assert why in choice.why
    assert choose("torch", named, installed).backend == "torch"


@pytest.mark.parametrize(
    ("backend", "installed", "on_tpu", "error"),
    [
        ("xla", XLA, False, ""),
        ("xla", NEW, False, "torch_xla is needed .*docs/coming_from.md"),
        ("xla", BOTH, False, "it ends with torch 2.9, but torch 2.13 is installed: "),
        ("xla", OLD, False, r"torch_xla is needed .*'tpunb\[xla\]'` installs a matching pair$"),
        ("xla", NOTHING, False, "torch is needed"),
        ("torchtpu", NEW, False, ""),
        ("torchtpu", NEW, True, "torch_tpu is needed"),
        ("torchtpu", TPU, True, ""),
        ("torchtpu", XLA, False, "needs torch 2.11 or later, but torch 2.9 is installed"),
        ("torch", NOTHING, False, "torch is needed"),
    ],
)
def test_what_is_missing_is_named_with_the_reason_and_the_fix(
    backend: BackendName, installed: Installed, on_tpu: bool, error: str
) -> None:
    choice = choose(None, {backend: SURE}, installed)
    assert choice.backend == backend
    if not error:
        choice.require("%%tpu_train", on_tpu=on_tpu)
        return
    with pytest.raises(SetupError, match=error) as raised:
        choice.require("%%tpu_train", on_tpu=on_tpu)
    assert "%%tpu_train (cell [2] has `it`)" in str(raised.value)
    if isinstance(raised.value, MissingPackageError):
        assert raised.value.install
    assert ("'tpunb[torchtpu]'" in str(raised.value)) == (on_tpu and backend != "xla")


def test_only_plain_torch_runs_on_several_hosts_without_a_tpu() -> None:
    for allowed in (("torch", "CPU", 2), ("xla", "TPU", 2), ("torchtpu", "CPU", 1)):
        require_one_host(*allowed)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match="TorchTPU is rehearsed on one host, and th"):
        require_one_host("torchtpu", "CPU", 2)


@pytest.mark.parametrize("installed", [False, True])
def test_a_stand_in_for_torch_tpu_does_not_change_what_is_installed(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        monkeypatch.syspath_prepend(torch_tpu.install_beside_torch(tmp_path))
    else:
        (tmp_path / "torch_tpu").mkdir()  # what is left of one is none
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_tpu", raising=False)
    assert find_installed().torch_tpu is installed
    loading.put_stand_in()
    assert find_installed().torch_tpu is installed
    assert not loading.is_loaded()
    loading.remove_stand_in()
    assert "torch_tpu" not in sys.modules


def test_a_python_without_its_shared_library_is_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = choose("xla", None, XLA)
    assert chosen.problem(on_tpu=False) is None
    of_debian = SimpleNamespace(version_info=(3, 99, 0), base_prefix="/usr")
    monkeypatch.setattr(choice, "sys", of_debian)
    with pytest.raises(
        MissingPackageError, match=r"^libpython3\.99\.so.*`sudo apt install libpython"
    ):
        chosen.require("%%tpu_train", on_tpu=False)
    assert choose("torch", None, XLA).problem(on_tpu=False) is None
