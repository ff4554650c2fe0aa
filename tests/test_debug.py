"""What `%%tpu_debug` cannot mend, it explains. (All else about it: test_magics.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os
os.environ["PJRT_DEVICE"] = "CPU"
from IPython.core.interactiveshell import InteractiveShell
import torch, torch_xla
from tpunb import debug

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


@pytest.mark.slow
def test_a_backward_pass_before_xla_started_is_explained() -> None:
    """When torch mends this, the hint and tpunb.worker.autograd can go."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ran.stdout == "raised\n", ran.stderr
    assert "Restart the kernel and use the XLA device first" in ran.stderr
