"""The kernel's own device, and a bug of torch in `%%tpu_debug` (more in test_magics)."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tpunb.kernel import device


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process in which no device is chosen and torch_xla is not imported."""
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.setattr(device, "_chosen", False)
    monkeypatch.setattr(device, "_cell_that_took_it", None)
    monkeypatch.setenv("PJRT_DEVICE", "")
    monkeypatch.delenv("PJRT_DEVICE")
    return monkeypatch


def importing_xla(kernel: pytest.MonkeyPatch, *, pjrt: str, runs: bool = False) -> None:
    """Do what importing torch_xla does: it always sets the variable."""
    xlac = SimpleNamespace(_xla_runtime_is_initialized=lambda: runs)
    kernel.setitem(sys.modules, "torch_xla", SimpleNamespace(_XLAC=xlac))  # type: ignore[misc]
    kernel.setenv("PJRT_DEVICE", pjrt)


def test_kernel_device_is_cpu_unless_tpu_is_requested(kernel: pytest.MonkeyPatch) -> None:
    assert (
        device.choose_device()
        == "the kernel uses XLA on CPU, so that runs can take a TPU (PJRT_DEVICE=CPU)"
    )
    assert not device.user_set_pjrt_device([])
    assert device.choose_device() is None
    assert device.choose_device("TPU") == "the kernel uses XLA on TPU (PJRT_DEVICE=TPU)"
    assert device.choose_device() is None  # the requested device stays
    assert os.environ["PJRT_DEVICE"] == "TPU"


def test_kernel_device_set_by_the_user_is_kept(kernel: pytest.MonkeyPatch) -> None:
    kernel.setenv("PJRT_DEVICE", "TPU")
    assert device.user_set_pjrt_device([])
    assert device.choose_device(set_by_user=True) is None
    said = device.choose_device("CPU", set_by_user=True)
    assert said == "the kernel still uses XLA on TPU, because this notebook sets PJRT_DEVICE=TPU"
    assert os.environ["PJRT_DEVICE"] == "TPU"


def test_the_variable_that_importing_torch_xla_sets_is_not_the_users_choice(
    kernel: pytest.MonkeyPatch,
) -> None:
    importing_xla(kernel, pjrt="TPU")
    assert not device.user_set_pjrt_device(["import torch_xla"])
    assert device.user_set_pjrt_device(["%env PJRT_DEVICE=TPU", "import torch_xla"])
    assert "uses XLA on CPU" in str(device.choose_device())
    assert os.environ["PJRT_DEVICE"] == "CPU"


def test_a_device_in_use_cannot_be_changed(kernel: pytest.MonkeyPatch) -> None:
    importing_xla(kernel, pjrt="CPU", runs=True)
    device.note_cell(SimpleNamespace(execution_count=7))
    device.note_cell(SimpleNamespace(execution_count=8))
    assert device.cell_that_took_device() == 7
    assert device.choose_device() is None
    assert device.choose_device("TPU") == (
        "the kernel still uses XLA on CPU: it is in use since cell [7]. "
        "Restart the kernel, and choose the TPU before any other cell uses XLA"
    )
    assert os.environ["PJRT_DEVICE"] == "CPU"


PROGRAM = """
import os
os.environ["PJRT_DEVICE"] = "CPU"
from IPython.core.interactiveshell import InteractiveShell
import torch, torch_xla
from tpunb.diagnostics import cell as debug

shell = InteractiveShell()
w = torch.ones(2, requires_grad=True)
w.sum().backward()
try:
    debug.run_cell(shell, '''
import torch, torch_xla
x = torch.ones(2, device=torch_xla.device(), requires_grad=True)
x.sum().backward()
''')
except RuntimeError:
    print("raised")
"""


@pytest.mark.usefixtures("starts_processes")
def test_importing_torch_xla_really_sets_it() -> None:
    code = "import os, torch_xla; print(os.environ['PJRT_DEVICE'])"
    env = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == "CPU\n"


@pytest.mark.usefixtures("starts_processes")
def test_a_backward_pass_before_xla_started_is_explained() -> None:
    """When torch fixes this, the hint and tpunb.backends.xla.runtime can be removed."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.stdout == "raised\n", ran.stderr
    assert "Restart the kernel and use the XLA device first" in ran.stderr
