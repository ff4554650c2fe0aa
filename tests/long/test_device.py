"""More of tests/kernel/test_device.py, which takes longer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.kernel.test_device import PROGRAM


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
