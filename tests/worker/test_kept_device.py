"""A rehearsal stays on the CPU, even if its cells set another device."""

from __future__ import annotations

import pytest

from tests.support import Driver

SET = "import os; os.environ['PJRT_DEVICE'] = 'TPU'"
USED = """
import os
import torch_xla
import torch_xla.runtime as xr
print(torch_xla.device(), xr.device_type(), os.environ["PJRT_DEVICE"])
print(os.popen("echo $PJRT_DEVICE").read().strip())
"""
TOLD = "PJRT_DEVICE=TPU is ignored: this run is a rehearsal on CPU"


@pytest.mark.parametrize(
    ("prelude", "before"),
    [([SET], ""), ([], SET), ([], "import torch_xla.runtime as xr; xr.set_device_type('TPU')")],
)
def test_pjrt_device_set_by_a_cell_stays_cpu_with_a_note(
    driver: Driver, prelude: list[str], before: str
) -> None:
    seen = driver.run(prelude, before + USED)
    assert seen.result.state == "succeeded", seen.log
    said = [line.partition("] ")[2] for line in seen.log]
    assert sorted(said) == sorted([TOLD, *2 * ["CPU"], *2 * ["xla:0 CPU CPU"]])


def test_pjrt_device_variable_can_be_removed(driver: Driver) -> None:
    cell = """
    import os
    before = dict(os.environ)
    os.environ.clear()
    assert "PJRT_DEVICE" not in os.environ
    os.environ.update(before)
    """
    assert driver.run([], cell).result.state == "succeeded"
