"""More of tests/kernel/test_setup.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.drivers.kernel import Kernel
from tests.fakes.machine import FakeMachine
from tests.kernel.test_setup import made, nb
from tests.machine.machines import machine

pytestmark = pytest.mark.usefixtures("lent")


def test_device_busy_error_names_the_cell_that_took_the_tpu(nb: Kernel, made: FakeMachine) -> None:
    device = made.root / "dev/vfio/0"
    taking = f"import torch_xla\ntorch_xla.device()\nheld = open({str(device)!r})"
    nb.run("import torch", "import").good()
    number = nb.run(taking, "taking").good().number
    nb.run("1 + 1", "later").good()
    ran = nb.run("%%tpu_train\npass", "train")
    assert (
        f"DeviceBusyError: the TPU is held by this notebook's kernel (process {nb.pid}) since "
        f"cell [{number}]"
    ) in ran.traceback
    assert "restart this kernel" in ran.traceback
    card = nb.run("%tpu_setup --no-warm", "setup").good().status
    assert "the TPU is held by this notebook's kernel" in card
    nb.run("held.close()", "later").good()
    assert "is held by" not in nb.run("%tpu_setup --no-warm", "setup").good().status
