"""A data set that raises below torch_xla's loaders."""

from __future__ import annotations

import pytest

from tests.support import Driver

LOOP = """
    import os, torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 10
        def __getitem__(self, index):
            if index == {bad} and os.environ["RANK"] == "1":
                raise ValueError(f"sample {{index}} cannot be read")
            return torch.full((2,), float(index))

    loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers={workers})
    for epoch in range(2):
        batches = pl.MpDeviceLoader(loader, torch_xla.device())
        for step, batch in enumerate(batches):
            print("step", step, batch[:, 0].tolist())
            xm.all_reduce("sum", [batch])
        print("epoch", epoch, len(batches))
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loop_raises_what_the_data_set_raised(driver: Driver, workers: int) -> None:
    seen = driver.run([], LOOP.format(bad=6, workers=workers))
    assert seen.result.state == "failed"
    failure = seen.result.failure
    assert failure is not None
    assert (failure.rank, failure.type) == (1, "ValueError")
    assert "sample 6 cannot be read" in failure.message
    assert "cell [1], line 10, in __getitem__" in failure.traceback
    steps = [line for line in seen.log if line.startswith("[1] step")]
    assert steps == [f"[1] step {n} [{2.0 * n}, {2.0 * n + 1}]" for n in range(3)]


def test_a_good_data_set_is_read_as_ever(driver: Driver) -> None:
    seen = driver.run([], LOOP.format(bad=-1, workers=0))
    assert seen.result.state == "succeeded"
    for rank in range(2):
        lines = [line for line in seen.log if line.startswith(f"[{rank}] ")]
        assert len([line for line in lines if " step " in line]) == 10
        assert lines[-1] == f"[{rank}] epoch 1 5"
