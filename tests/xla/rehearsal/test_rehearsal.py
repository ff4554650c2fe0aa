"""Several cores on CPU, in real processes: the calls of torch_xla's data-parallel training."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.ranks import Ranks, rehearse

# Functions without `test_` run in ranks; each is followed by the test that calls it.


def identity() -> dict[str, Any]:
    rank, _ = rehearse()
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    devices = xm.get_xla_supported_devices()
    xm.set_replication(torch_xla.device(), devices)
    assert str(torch_xla.device()) == "xla:0"
    assert len(xr.global_runtime_device_attributes()) == xr.world_size()
    xm.master_print(f"printed by {rank}")
    return {
        "world_size": xr.world_size(),
        "global_device_count": xr.global_device_count(),
        "global_runtime_device_count": xr.global_runtime_device_count(),
        "local_device_count": xr.local_device_count(),
        "local_process_count": xr.local_process_count(),
        "process_count": xr.process_count(),
        "global_ordinal": xr.global_ordinal(),
        "local_ordinal": xr.local_ordinal(),
        "process_index": xr.process_index(),
        "master": xm.is_master_ordinal(local=False),
        "local_master": xm.is_master_ordinal(),
    }


def test_rank_numbers_and_world_size_in_each_rank(ranks: Ranks) -> None:
    ended = ranks.run(identity, 4)
    for rank, end in enumerate(ended):
        assert not end.error
        assert end.value == {
            "world_size": 4,
            "global_device_count": 4,
            "global_runtime_device_count": 4,
            "local_device_count": 4,
            "local_process_count": 4,
            "process_count": 4,
            "global_ordinal": rank,
            "local_ordinal": rank,
            "process_index": rank,
            "master": rank == 0,
            "local_master": rank == 0,
        }
        assert end.output == ("printed by 0\n" if rank == 0 else "")


def asked_before_the_fork() -> int:
    import torch_xla.runtime as xr

    assert xr.world_size() == 1  # torch_xla keeps this answer
    rehearse()
    return xr.world_size()


def test_world_size_asked_before_the_fork_is_not_cached(ranks: Ranks) -> None:
    assert ranks.values(asked_before_the_fork, 2) == [2, 2]


def only_imported() -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    before = [dict(vars(module)) for module in (torch_xla._XLAC, xm, xr)]
    import tpunb.xla.rehearsal.install  # noqa: F401

    assert [dict(vars(module)) for module in (torch_xla._XLAC, xm, xr)] == before
    assert xr.world_size() == 1
    assert xm.all_reduce is vars(xm)["all_reduce"]


def test_rehearsal_import_replaces_nothing(ranks: Ranks) -> None:
    ranks.values(only_imported, 1)


def reduced(kind: str) -> list[list[Any]]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    values = {
        "float": [1.5, -2.0, 3.0, 0.25],
        "integer": [1, 2, 3, 12],
        "bool": [True, False, True, True],
    }
    types = {
        "float": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
        "integer": [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8],
        "bool": [torch.bool],
    }
    operations = ["sum", "mul", "min", "max"] + (["and", "or"] if kind != "float" else [])
    found = []
    for operation in operations:
        for dtype in types[kind]:
            tensor = torch.tensor(values[kind][rank], device=torch_xla.device()).to(dtype)
            one = xm.all_reduce(operation, tensor)
            other = xm.all_reduce(operation, tensor.reshape(1), pin_layout=False)
            several = [tensor.clone(), tensor.reshape(1, 1).clone()]
            assert xm.all_reduce(operation, several) is several
            for result in (one, other, *several):
                assert result.dtype == dtype
                assert result.item() == one.item()
            assert one.shape == ()
            assert several[1].shape == (1, 1)
            found.append([operation, one.item()])
    return found


EXPECTED = {
    "float": {"sum": 2.75, "mul": -2.25, "min": -2.0, "max": 3.0},
    "integer": {"sum": 18, "mul": 72, "min": 1, "max": 12, "and": 0, "or": 15},
    "bool": {"sum": True, "mul": False, "min": False, "max": True, "and": False, "or": True},
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_all_reduce_of_every_kind_and_type(ranks: Ranks, kind: str) -> None:
    for found in ranks.values(reduced, 4, kind):
        assert len(found) >= len(EXPECTED[kind])
        for operation, value in found:
            assert value == EXPECTED[kind][operation], operation


def reduced_in_place() -> dict[str, Any]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    leaf = torch.full((2,), float(rank + 1), device=device, requires_grad=True)
    base = torch.zeros(4, device=device)
    view = base[1:3]
    view.add_(rank + 1)
    number = torch.tensor(10 * (rank + 1), device=device)
    pending = torch.ones(3, device=device) * 2 + rank
    version = leaf._version
    xm.all_reduce("sum", [leaf, view, number, pending], scale=0.5)
    assert leaf.requires_grad
    assert leaf._version == version
    (leaf * torch.ones(2, device=device)).sum().backward()
    scaled = xm.all_reduce("sum", leaf, scale=2.0)
    plain = xm.all_reduce("sum", leaf)
    return {
        "leaf": leaf.tolist(),
        "grad": leaf.grad.tolist(),
        "base": base.tolist(),
        "view": view.tolist(),
        "number": number.item(),
        "pending": pending.tolist(),
        "scaled": (scaled.tolist(), scaled.requires_grad, scaled.is_leaf),
        "plain": (plain.tolist(), plain.requires_grad, plain.is_leaf),
    }


def test_all_reduce_in_place(ranks: Ranks) -> None:
    assert ranks.values(reduced_in_place, 2) == [
        {
            "leaf": [1.5, 1.5],
            "grad": [1.0, 1.0],
            # The base of a view does not change (seen with one replica).
            "base": [0.0, rank + 1.0, rank + 1.0, 0.0],
            "view": [1.5, 1.5],
            # XLA casts the scale to the tensor's type first: an integer 0.
            "number": 0,
            "pending": [2.5, 2.5, 2.5],
            # As torch_xla's own functions return them (seen with one replica).
            "scaled": ([6.0, 6.0], True, True),
            "plain": ([3.0, 3.0], True, False),
        }
        for rank in range(2)
    ]


def reduced_in_16_bits() -> list[float]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    # 256 + 1 is 256 in bfloat16, so adding one after the other in it gives 256.
    value = torch.tensor(256.0 if rank == 0 else 1.0, dtype=torch.bfloat16, device=device)
    large = torch.tensor(40000.0, dtype=torch.float16, device=device)
    return [xm.all_reduce("sum", value).item(), xm.all_reduce("sum", large, scale=0.25).item()]


def test_16_bit_floats_are_reduced_in_32_bits_and_overflow_as_on_a_tpu(ranks: Ranks) -> None:
    assert ranks.values(reduced_in_16_bits, 4) == 4 * [[260.0, math.inf]]


def reduced_in_groups() -> dict[str, Any]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    value = torch.tensor([float(2**rank)], device=torch_xla.device())
    found = {
        "halves": xm.all_reduce("sum", value, groups=[[0, 1], [2, 3]]).item(),
        "gathered": xm.all_gather(value, groups=[[0, 2], [1, 3]]).tolist(),
        "unpinned": xm.all_gather(value, groups=[[3, 1], [2, 0]], pin_layout=False).tolist(),
        "alone": xm.all_reduce("sum", value, groups=[[0], [1], [2], [3]]).item(),
    }
    wrong = [[[1, 0]], [[1, 2]], [[0, 1], [1, 2, 3]], [[0, 1, 2, 3], []], [[0, 1], [2, 4]]]
    for groups in wrong:
        with pytest.raises(
            ValueError, match="XLA accepts only non-empty groups that name each of the 4 ranks"
        ):
            xm.all_reduce("sum", value, groups=groups)
    return found


def test_collectives_in_groups_of_ranks(ranks: Ranks) -> None:
    found = ranks.values(reduced_in_groups, 4)
    assert [f["halves"] for f in found] == [3.0, 3.0, 12.0, 12.0]
    assert [f["gathered"] for f in found] == [[1.0, 4.0], [2.0, 8.0], [1.0, 4.0], [2.0, 8.0]]
    assert [f["unpinned"] for f in found] == [[4.0, 1.0], [8.0, 2.0], [4.0, 1.0], [8.0, 2.0]]
    assert [f["alone"] for f in found] == [1.0, 2.0, 4.0, 8.0]


def gathered() -> None:
    rank, world = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool):
        parts = [(torch.arange(6).reshape(2, 3) + other).to(dtype) for other in range(world)]
        for dim in (0, 1, -1):
            for pin_layout in (True, False) if dtype != torch.bool else (False,):
                found = xm.all_gather(parts[rank].to(device), dim, pin_layout=pin_layout)
                assert found.dtype == dtype
                assert torch.equal(found.cpu(), torch.cat(parts, dim)), (dtype, dim, pin_layout)


@pytest.mark.parametrize("count", [2, 4])
def test_all_gather(ranks: Ranks, count: int) -> None:
    ranks.values(gathered, count)


def met(folder: str) -> dict[str, Any]:
    rank, _ = rehearse()
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    found = {
        "payloads": xm.rendezvous("one", bytes([rank]) * rank),
        "empty": xm.rendezvous("two"),
        "mean": float(xm.mesh_reduce("accuracy", float(rank), np.mean)),
        "tensor": xm.mesh_reduce("t", torch.tensor([rank], device=device), sum).item(),
    }
    with pytest.raises(TypeError, match="`payload` must be bytes"):
        xm.rendezvous("three", "text")
    with pytest.raises(ValueError, match="Only global rendezvous"):
        xm.rendezvous("four", b"", [0])
    xm.save({"rank": torch.tensor(rank, device=device)}, f"{folder}/saved.pt")
    xm.rendezvous("saved")
    found["saved"] = torch.load(f"{folder}/saved.pt")["rank"].item()
    return found


def test_rendezvous_mesh_reduce_and_save(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.values(met, 3, str(tmp_path)) == 3 * [
        {
            "payloads": [b"", b"\1", b"\2\2"],
            "empty": [b"", b"", b""],
            "mean": 1.0,
            "tensor": 3,
            "saved": 0,
        }
    ]


def broadcast() -> list[Any]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[1].num_batches_tracked.fill_(rank + 5)
    model.to(torch_xla.device())
    xm.broadcast_master_param(model)
    other = torch.tensor([float(rank)], device=torch_xla.device())
    xm.collective_broadcast([other], root_ordinal=1)
    return [*(p.tolist() for p in model.state_dict().values()), other.item()]


def test_broadcast(ranks: Ranks) -> None:
    first, *others = ranks.values(broadcast, 3)
    assert others == [first, first]
    assert first[-2:] == [5, 1.0]


def train(optimizer_name: str, workers: int) -> tuple[list[float], list[Any]]:
    """Three epochs over 24 samples in global batches of 8, seen in the same order."""
    world = int(os.environ["WORLD_SIZE"])
    rank = rehearse()[0] if world > 1 else 0
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as pl
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    torch.manual_seed(0)
    features, labels = torch.randn(24, 1, 8, 8), torch.randint(0, 10, (24,))
    device = torch_xla.device()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    ).to(device)
    optimizer = {
        "SGD": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "AdamW": lambda: torch.optim.AdamW(model.parameters(), lr=0.01),
    }[optimizer_name]()
    data = TensorDataset(features, labels)
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(data, batch_size=8 // world, sampler=sampler, num_workers=workers)
    loss_function = torch.nn.CrossEntropyLoss()
    losses = []
    for _ in range(3):
        for x, y in pl.MpDeviceLoader(loader, device):
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            xm.optimizer_step(optimizer)
            losses.append(loss)
    values = [
        xm.mesh_reduce("loss", loss.item(), lambda every: sum(every) / len(every))
        if world > 1
        else loss.item()
        for loss in losses
    ]
    return values, [p.detach().cpu().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize(
    ("optimizer", "workers", "counts"), [("SGD", 0, [2, 4]), ("AdamW", 2, [2])]
)
def test_training_on_several_ranks_equals_one_rank(
    ranks: Ranks, optimizer: str, workers: int, counts: list[int]
) -> None:
    ((losses, weights),) = ranks.values(train, 1, optimizer, workers)
    assert len(losses) == 9
    assert losses[-1] < losses[0]
    for count in counts:
        for found, found_weights in ranks.values(train, count, optimizer, workers):
            assert found == pytest.approx(losses, rel=1e-5)
            for parameter, expected in zip(found_weights, weights, strict=True):
                assert parameter == pytest.approx(expected, rel=1e-5, abs=1e-6)


def step_closures() -> tuple[list[str], list[str], bool]:
    rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    ran: list[str] = []
    x = torch.ones(2, device=torch_xla.device())
    xm.add_step_closure(ran.append, args=("closure",))
    torch_xla.manual_seed(1)
    before = xm.all_reduce("sum", torch.rand(3, device=torch_xla.device()))
    xm.all_reduce("sum", [x])
    during = list(ran)
    torch_xla.sync()
    torch_xla.manual_seed(1)
    alone = torch.rand(3, device=torch_xla.device()) * 2
    return during, ran, torch.equal(before.cpu(), alone.cpu())


def test_a_collective_runs_no_step_closures_and_draws_no_random_numbers(ranks: Ranks) -> None:
    assert ranks.values(step_closures, 2) == 2 * [([], ["closure"], True)]


def disagreeing(how: str) -> tuple[str, float]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal.errors import MismatchError

    device = torch_xla.device()
    x = torch.ones(3, device=device)
    sizes = range(1, 60) if rank else [*range(1, 17), 99, *range(18, 60)]
    call = {
        "shape": lambda: xm.all_reduce("sum", torch.ones(5, device=device) if rank == 1 else x),
        "type": lambda: xm.all_gather(x.to(torch.int32 if rank else torch.int64)),
        "operation": lambda: (
            xm.rendezvous("end of epoch") if rank == 2 else xm.all_reduce("max", x)
        ),
        "groups": lambda: xm.all_reduce("sum", x, groups=[[0, 1, 2]] if rank else [[0, 1], [2]]),
        "root": lambda: xm.collective_broadcast([x], root_ordinal=rank // 2),
        "list": lambda: xm.all_reduce("sum", [torch.ones(n, device=device) for n in sizes], 0.5),
    }[how]
    with pytest.raises(MismatchError) as raised:
        call()
    # The ranks still agree.
    together = xm.all_reduce("sum", torch.ones(1, device=device)).item()
    return str(raised.value), together


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "shape",
            [
                r"ranks 0, 2: all_reduce sum of float32\[3\]\n +line \d+ of test_rehearsal.py: ",
                r"rank 1: all_reduce sum of float32\[5\]",
            ],
        ),
        ("type", [r"rank 0: .*int64\[", r"ranks 1, 2: .*int32\["]),
        (
            "operation",
            [
                r"ranks 0, 1: all_reduce max of float32\[3\]",
                r"rank 2: rendezvous 'end of epoch'\n.*xm\.rendezvous",
            ],
        ),
        (
            "groups",
            [
                r"rank 0: all_reduce sum of float32\[3\], groups \[\[0, 1\], \[2\]\]",
                r"ranks 1, 2: all_reduce sum of float32\[3\], groups \[\[0, 1, 2\]\]",
            ],
        ),
        (
            "root",
            [
                r"ranks 0, 1: all_reduce sum of float32\[3\], broadcast from rank 0\n",
                r"rank 2: all_reduce sum of float32\[3\], broadcast from rank 1\n",
            ],
        ),
        (
            "list",
            [
                r"rank 0: all_reduce sum of 59 tensors \(.*\), scale 0.5, tensor 17 is float32\[99",
                r"ranks 1, 2: .*tensor 17 is float32\[17\]",
            ],
        ),
    ],
)
def test_mismatch_error_on_every_rank_lists_the_calls(
    ranks: Ranks, how: str, said: list[str]
) -> None:
    for message, together in ranks.values(disagreeing, 3, how):
        for text in said:
            assert re.search(text, message), message
        assert together == 3.0


def leaving(how: str) -> tuple[str, str, str]:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal import errors

    x = torch.ones(2, device=torch_xla.device())
    xm.all_reduce("sum", x)
    if rank == 1 and how == "returns":
        return "", "", ""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.CollectiveError) as raised:
        xm.all_reduce("min", x)
    with pytest.raises(errors.CollectiveError) as again:
        xm.rendezvous("later")
    return type(raised.value).__name__, str(raised.value), str(again.value)


@pytest.mark.parametrize("how", ["returns", "is killed"])
def test_lost_rank_is_named_in_a_collective(ranks: Ranks, how: str) -> None:
    ended = ranks.run(leaving, 3, how)
    assert ended[1].exitcode == (0 if how == "returns" else -signal.SIGKILL)
    for rank in (0, 2):
        kind, message, later = ended[rank].value
        assert kind == "PeerLostError"
        assert message.startswith(
            f"rank 1 ended while rank {rank} waited in all_reduce min of float32[2]."
        )
        assert later.startswith("rendezvous 'later' cannot run: an earlier collective failed:")


def wait_for(*files: str) -> None:
    deadline = time.monotonic() + 100
    while not all(os.path.exists(file) for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def late(when: str, folder: str) -> tuple[str, str]:
    from tpunb.xla.rehearsal import errors, waiting, wire

    assert wire.TIMEOUT == 300.0
    rank, _ = rehearse(timeout=3.0, times=waiting.WaitTimes(inquiry=0.5))
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    x = torch.ones(2, device=torch_xla.device())
    if when == "later":
        xm.all_reduce("sum", x)
    if rank == 1:
        wait_for(f"{folder}/0", f"{folder}/2")
        return "", ""
    if rank == 0:
        threading.Timer(0.6, Path(folder, "waits").touch).start()
    else:
        wait_for(f"{folder}/waits")  # its own time is not over when that of rank 0 is
    with pytest.raises(errors.CollectiveError) as raised:
        xm.all_reduce("min", x)
    Path(folder, str(rank)).touch()
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize("when", ["first", "later"])
def test_timeout_in_a_collective_names_the_missing_rank(
    ranks: Ranks, when: str, tmp_path: Path
) -> None:
    found = ranks.values(late, 3, when, str(tmp_path))
    for rank in (0, 2):
        kind, message = found[rank]
        assert kind == "WaitedTooLongError"
        assert re.match(
            rf"rank {rank} waited \d+ s in all_reduce min of float32\[2\], but rank 1 did not take "
            "part",
            message,
        )


def interrupt_the_wait() -> None:
    """Send this process a SIGINT, once its main thread waits for other ranks."""
    from tpunb.xla.rehearsal import waiting

    def is_waiting() -> bool:
        frame = sys._current_frames().get(main)
        while frame and frame.f_code not in places:
            frame = frame.f_back
        return frame is not None

    def interrupt() -> None:
        while not is_waiting():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    main = threading.main_thread().ident
    places = waiting.Connections.wait.__code__, waiting.Connections._connect.__code__
    threading.Thread(target=interrupt, daemon=True).start()


def interrupted(when: str, folder: str) -> str:
    rank, _ = rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal import errors

    x = torch.ones(2, device=torch_xla.device())
    if when == "later":
        xm.all_reduce("sum", x)
    if rank == 1:
        wait_for(f"{folder}/out")  # and never comes
        return ""
    interrupt_the_wait()
    with pytest.raises(KeyboardInterrupt):
        xm.all_reduce("min", x)
    Path(folder, "out").touch()
    with pytest.raises(errors.CollectiveError) as raised:
        xm.rendezvous("save")
    return str(raised.value)


@pytest.mark.parametrize("when", ["first", "later"])
def test_interrupt_ends_a_wait_in_a_collective(ranks: Ranks, when: str, tmp_path: Path) -> None:
    message = ranks.values(interrupted, 2, when, str(tmp_path))[0]
    assert message.startswith(
        "rendezvous 'save' cannot run: rank 0 left all_reduce min of float32[2] with "
        "KeyboardInterrupt while the others waited in it."
    )


def not_rehearsed() -> None:
    rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla import private_names
    from tpunb.xla.rehearsal.errors import NotRehearsedError

    x = torch.ones(4, 4, device=torch_xla.device())
    for call in (
        lambda: xm.send(x, 0),
        lambda: xm.recv(x, 0),
        lambda: xm.all_reduce("sum", x.to(torch.float8_e5m2)),
    ):
        with pytest.raises(NotRehearsedError, match="is not rehearsed on CPU cores"):
            call()
    refused = private_names.names_of_kind("refused", private_names.XLAC)
    assert len(refused) >= 4
    for name in refused:
        with pytest.raises(NotRehearsedError, match=rf"^{name} is not rehearsed"):
            getattr(torch_xla._XLAC, name)()
    with pytest.raises(ValueError, match="there is no reduce type 'avg'"):
        xm.all_reduce("avg", x)
    with pytest.raises(ValueError, match="'and' needs bool or integer tensors"):
        xm.all_reduce("and", x)


def test_calls_that_are_not_rehearsed_are_explained(ranks: Ranks) -> None:
    ranks.values(not_rehearsed, 2)


def reduced_in_a_thread() -> list[float]:
    rehearse()
    import threading

    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    sums: list[float] = []

    def reduce() -> None:
        for number in range(100):
            value = torch.full((3,), float(number), device=device)
            sums.append(xm.all_reduce("sum", value * 2)[0].item())

    thread = threading.Thread(target=reduce)
    thread.start()
    while thread.is_alive():  # its collectives compute nothing of what is just being made here
        assert (torch.ones(5, device=device) * 2).sum().item() == 10.0
    return sums


def test_a_thread_may_reduce_while_the_main_thread_computes(ranks: Ranks) -> None:
    expected = [number * 4.0 for number in range(100)]
    assert ranks.values(reduced_in_a_thread, 2) == [expected, expected]


def in_a_child() -> str:
    rehearse()
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal import errors
    from tpunb.xla.rehearsal.call import Call

    xm.all_reduce("sum", torch.ones(1, device=torch_xla.device()))
    # XLA itself would hang in a child: only the wire is used.
    wire = xm.xla_rendezvous.__self__.peers.wire
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with wire.exchange(Call("rendezvous"), [0, 1]):
                pass
        except errors.CollectiveError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    message = os.read(read, 1000).decode()
    os.waitpid(pid, 0)
    return message


def test_a_child_of_a_rank_cannot_take_part(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks.values(in_a_child, 2)):
        assert message.startswith(f"rendezvous was called in a child process of rank {rank}")


def own_groups() -> dict[str, Any]:
    rank, _ = rehearse()
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    dist.init_process_group("gloo")
    cpu = torch.tensor([float(rank)])
    dist.all_reduce(cpu)
    xla = xm.all_reduce("sum", torch.tensor([float(rank)], device=device))
    dist.all_reduce(cpu)
    dist.destroy_process_group()
    return {"cpu": cpu.item(), "xla": xla.item()}


def test_the_users_process_groups_are_undisturbed(ranks: Ranks) -> None:
    assert ranks.values(own_groups, 2) == 2 * [{"cpu": 2.0, "xla": 1.0}]


def ddp() -> list[Any]:
    rank, world = rehearse()
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.xla_backend
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("xla", init_method="xla://")
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    device = torch_xla.device()
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device), gradient_as_bucket_view=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3).to(device)).sum().backward()
        optimizer.step()
        torch_xla.sync()
    summed = torch.tensor([float(rank)], device=device)
    dist.all_reduce(summed)
    return [*(p.tolist() for p in model.parameters()), summed.item()]


def test_ddp_on_the_xla_backend(ranks: Ranks) -> None:
    first, second = ranks.values(ddp, 2)
    assert first == second
    assert first[-1] == 1.0


def quiet() -> None:
    rehearse()
    import torch_xla.core.xla_model as xm

    os.write(1, b"before\n")
    xm.rendezvous("first")
    os.write(1, b"after\n")


def test_gloo_writes_nothing_to_stdout(ranks: Ranks) -> None:
    assert [ended.output for ended in ranks.run(quiet, 2)] == 2 * ["before\nafter\n"]


def threads() -> list[int]:
    counts = [len(os.listdir("/proc/self/task"))]
    rank, world = rehearse()
    import torch
    import torch_xla.core.xla_model as xm

    from tpunb.xla.rehearsal.call import Call

    counts.append(len(os.listdir("/proc/self/task")))
    # Only the wire: XLA's own pools grow at any time.
    wire = xm.xla_rendezvous.__self__.peers.wire
    call = Call("test")
    for _ in range(2):
        for _ in range(100):
            flat = torch.ones(10) * rank
            with wire.exchange(call, range(world)):
                wire.all_reduce(flat, range(world), call)
            assert flat.tolist() == 10 * [1.0]
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_installing_starts_no_thread_and_the_wire_few(ranks: Ranks) -> None:
    for before, installed, connected, later in ranks.values(threads, 2):
        assert installed == before
        assert connected <= before + 3
        assert later == connected


def without_a_store() -> str:
    from tpunb.errors import SetupError

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    with pytest.raises(SetupError) as raised:
        rehearse()
    return str(raised.value)


def test_missing_torch_elastic_store_is_explained(ranks: Ranks) -> None:
    assert "TORCHELASTIC_USE_AGENT_STORE is not True" in ranks.values(without_a_store, 1)[0]
