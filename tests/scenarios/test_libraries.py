"""Libraries that train, in ranks. Whole notebooks of each are in tests/long/test_notebooks.py."""

from __future__ import annotations

from tests.support import Driver

PRELUDE = "import accelerate"
TRAIN = """
import torch
accelerator = accelerate.Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0, device=accelerator.device))
found = (accelerator.num_processes, accelerator.process_index, total.item())
print(*found)
"""


def test_accelerate_uses_the_ranks_of_the_run(driver: Driver) -> None:
    seen = driver.run([PRELUDE], TRAIN)
    assert seen.result.state == "succeeded", "\n".join(seen.log)
    assert {"[0] 2 0 3.0", "[1] 2 1 3.0"} <= set(seen.log)
