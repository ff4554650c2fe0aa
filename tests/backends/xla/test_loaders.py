"""Data sets that raise below torch_xla's loaders, and the time that counts as waiting for input."""

from __future__ import annotations

import textwrap

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


WAITS = """
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl
    from tpunb.runs import heartbeat

    def is_counted():
        before = heartbeat.input_seconds()
        heartbeat.timed_read(lambda: None)  # within another read it adds nothing
        return heartbeat.input_seconds() == before

    sync, in_sync = torch_xla.sync, []

    def watched(*args, **options):
        in_sync.append(is_counted())
        sync(*args, **options)

    torch_xla.sync = watched
    for batch in pl.MpDeviceLoader([torch.ones(2)] * 3, torch_xla.device()):
        batch.sum()
    print("in sync", in_sync, "waited", heartbeat.input_seconds() > 0)
"""


def test_the_step_that_ends_in_a_loader_is_no_waiting_for_input(driver: Driver) -> None:
    seen = driver.run([], "import torch\n" + textwrap.dedent(WAITS))
    assert seen.result.state == "succeeded"
    assert f"[0] in sync {[False] * 5} waited True" in seen.log
