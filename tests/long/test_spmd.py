"""More of tests/scenarios/test_spmd.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.drivers.kernel import Kernel, kernel
from tests.scenarios.test_spmd import ONE, SPMD, nb

pytestmark = pytest.mark.usefixtures("lent")


def test_spmd_in_a_debug_cell_does_not_affect_later_runs(nb: Kernel) -> None:
    """One device in the kernel, so a mesh of one."""
    assert nb.run(f"%%tpu_debug\n{SPMD}").good().stdout.endswith("1 56.0\n")
    assert nb.value("os.environ['XLA_USE_SPMD']") == "1"
    ranks = nb.run("%%tpu_train --cores 2\nprint(xr.is_spmd(), xr.world_size())").good()
    lines = ranks.stdout.splitlines()  # equal ones are folded if they come together
    assert "[0-1] False 2" in lines or {"[0] False 2", "[1] False 2"} <= set(lines)
    assert ONE not in ranks.stdout
    again = nb.run(f"%%tpu_train --cores 2\n{SPMD}").good()
    assert "[0] 2 56.0" in again.stdout
    assert "XLA_USE_SPMD is being deprecated" not in again.stdout
    assert nb.run("%%tpu_debug\nprint(xr.is_spmd(), (x + 1).sum().item())").good().stdout == (
        "True 36.0\n"
    )
