"""What ranks compare before torch.distributed's collectives, on the CPU and on a rehearsed TPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.drivers.devices import BACKENDS, rehearse_on
from tests.drivers.ranks import Ranks
from tpunb.backends.rehearsal.errors import CollectiveError
from tpunb.backends.rehearsal.install import end_rehearsal, leave_rehearsal
from tpunb.backends.rehearsal.stats import collective_stats

# Functions without `test_` run in ranks; each is followed by the test that calls it.


def on_each_device(function: Any) -> Any:
    return pytest.mark.parametrize("device", list(BACKENDS))(function)


# -- mistakes


class Mistakes:
    """What one rank does differently. `x`: a tensor of two numbers."""

    def __init__(self, rank: int, device: str) -> None:
        self.rank = rank
        self.device = device
        self.x = torch.ones(2, device=device)

    def one_less(self) -> None:
        for _ in range(4 - self.rank):
            dist.all_reduce(self.x)

    def other_shape(self) -> None:
        dist.all_reduce(torch.ones(2 + self.rank, device=self.device))

    def other_reduction(self) -> None:
        dist.all_reduce(self.x, op=dist.ReduceOp.MAX if self.rank else dist.ReduceOp.SUM)

    def other_call(self) -> None:
        if self.rank:
            dist.broadcast(self.x, 0)
        else:
            dist.all_reduce(self.x)

    def under_a_condition(self) -> None:
        if self.rank == 0:
            dist.all_reduce(self.x)
        dist.barrier()

    def other_list(self) -> None:
        parts = [torch.ones(3, device=self.device) for _ in range(2)]
        dist.gather(self.x, None if self.rank else parts, dst=0)

    def one_batch_less(self) -> None:
        model = DistributedDataParallel(nn.Linear(3, 2).to(self.device))
        for _ in range(3 - self.rank):
            model(torch.ones(4, 3, device=self.device)).sum().backward()

    def other_group(self) -> None:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        for group in groups if self.rank else reversed(groups):
            dist.all_reduce(self.x, group=group)

    def other_parts(self) -> None:
        sent = [1, 3] if self.rank else [2, 2]
        four = torch.ones(4, device=self.device)
        dist.all_to_all_single(torch.empty_like(four), four, [2, 2], sent)

    def other_backward(self) -> None:
        """In the thread of autograd, from C++."""

        class Reduced(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                dist.all_reduce(grad[self.rank :].clone())
                return grad

        Reduced.apply(self.x.requires_grad_()).sum().backward()

    def ended(self) -> None:
        if self.rank:
            os._exit(3)
        dist.all_reduce(self.x)

    def in_a_child(self) -> None:
        """As in a DataLoader's worker."""
        dist.all_reduce(self.x)
        pid = os.fork()
        if pid == 0:
            try:
                dist.all_reduce(self.x)
            except CollectiveError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        dist.all_reduce(torch.ones(2 + self.rank, device=self.device))


def mistaken(device: str, mistake: str) -> tuple[str, str]:
    """The error of this rank, by its class and text."""
    rank, _ = rehearse_on(device)
    try:
        getattr(Mistakes(rank, device), mistake)()
    except CollectiveError as error:
        return type(error).__name__, str(error)
    finally:
        leave_rehearsal()
        time.sleep(1)  # the process of a rank that leaves first is still there
    return "", ""


DIFFERENT = {
    "other_shape": ("all_reduce sum of float32[2]", "all_reduce sum of float32[3]"),
    "other_reduction": ("all_reduce sum of float32[2]", "all_reduce max of float32[2]"),
    "other_call": ("all_reduce sum of float32[2]", "broadcast of float32[2]"),
    "other_list": ("to rank 0, parts: float32 3, float32 3", "to rank 0"),
    "under_a_condition": ("all_reduce sum of float32[2]", "barrier"),
    "other_group": ("group 2 of ranks [0, 1]", "group 1 of ranks [0, 1]"),
    "other_backward": ("all_reduce sum of float32[2]", "all_reduce sum of float32[1]"),
    "in_a_child": ("all_reduce sum of float32[2]", "all_reduce sum of float32[3]"),
}


@on_each_device
@pytest.mark.parametrize("mistake", DIFFERENT)
def test_different_calls_are_named_on_all_ranks(ranks: Ranks, device: str, mistake: str) -> None:
    for kind, message in ranks.values(mistaken, 2, device, mistake):
        assert kind == "MismatchError"
        _, first, second = message.split("  rank ")
        assert first.startswith("0: ")
        assert second.startswith("1: ")
        assert DIFFERENT[mistake][0] in first
        assert DIFFERENT[mistake][1] in second
        assert message.count("of test_distributed.py: ") == 2
        hang = "On a TPU" if device == "tpu" else "With gloo alone"
        assert f"{hang} this would hang or crash." in message


@on_each_device
@pytest.mark.parametrize("mistake", ["one_less", "one_batch_less"])
def test_a_rank_that_has_left_is_named(ranks: Ranks, device: str, mistake: str) -> None:
    (kind, message), other = ranks.values(mistaken, 2, device, mistake)
    assert kind == "PeerLostError"
    assert "rank 1 has returned from the train cell while rank 0 waited in all_reduce" in message
    assert "of test_distributed.py: " in message
    assert other == ("", "")


@on_each_device
def test_parts_that_do_not_fit_are_named(ranks: Ranks, device: str) -> None:
    for kind, message in ranks.values(mistaken, 2, device, "other_parts"):
        assert kind == "MismatchError"
        assert message.splitlines()[1:] == [
            "  rank 1 sends 1 elements to rank 0, which expects 2",
            "  rank 1 sends 3 elements to rank 1, which expects 2",
        ]


@on_each_device
def test_a_rank_that_has_ended_is_named(ranks: Ranks, device: str) -> None:
    waiting, ended = ranks.run(mistaken, 2, device, "ended")
    kind, message = waiting.value
    assert kind == "PeerLostError"
    assert message.startswith("rank 1 ended while rank 0 waited in all_reduce sum of float32[2]")
    assert ended.exitcode == 3


def crossed(device: str) -> tuple[str, str]:
    rank, _ = rehearse_on(device)
    pair = dist.new_group([0, 1])
    x = torch.ones(2, device=device)
    try:
        for group in (pair, None) if rank == 0 else (None, pair):
            if rank < 2 or group is None:
                dist.all_reduce(x, group=group)
    except CollectiveError as error:
        time.sleep(2)  # until the others have found it
        return type(error).__name__, str(error)
    return "", ""


@on_each_device
def test_groups_in_opposite_order_are_a_deadlock(ranks: Ranks, device: str) -> None:
    for kind, message in ranks.values(crossed, 3, device):
        assert kind == "DeadlockError"
        assert "rank 0: all_reduce sum of float32[2]" in message
        assert "group 1 of ranks [0, 1]" in message


def late(device: str) -> str:
    rank, _ = rehearse_on(device)
    x = torch.ones(2, device=device)
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(x, group=group)
    try:
        if rank == 0:
            dist.all_reduce(x, group=group)
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    time.sleep(5)
    return ""


@on_each_device
def test_a_group_keeps_its_own_time_out(ranks: Ranks, device: str) -> None:
    first, second = ranks.values(late, 2, device)
    assert first.startswith("WaitedTooLongError: rank 0 waited 1 s in all_reduce sum")
    assert "rank 1 did not take part" in first
    assert second == ""


# -- correct programs


class Programs:
    """Programs that are right, and find that out themselves."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank = rank
        self.world = world
        self.device = device

    def own(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor filled with the rank's number plus one."""
        return torch.full(shape, self.rank + 1, dtype=dtype, device=self.device)

    def from_different_lines(self) -> None:
        x = self.own(2)
        if self.rank:
            dist.all_reduce(x)
        else:
            dist.all_reduce(x)
        assert x.tolist() == [10, 10]

    def started_together(self) -> None:
        """Several calls at once, awaited in another order."""
        values = [self.own(2) * factor for factor in range(1, 5)]
        works = [dist.all_reduce(value, async_op=True) for value in values]
        for work in reversed(works):
            work.wait()
        assert all(work.is_completed() for work in works)
        assert [value[0].item() for value in values] == [10, 20, 30, 40]
        future = dist.all_reduce(self.own(1), async_op=True).get_future()
        assert future.wait()[0].item() == 10

    def subsets(self) -> None:
        """Each group makes as many calls as it likes."""
        low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
        odd = dist.new_group([1, 3])
        group = low if self.rank < 2 else high
        for _ in range(2 + self.rank // 2):
            x = self.own(2)
            dist.all_reduce(x, group=group)
        assert x.tolist() == ([3, 3] if self.rank < 2 else [7, 7])
        if self.rank % 2:
            x = self.own(1)
            dist.all_reduce(x, group=odd)
            assert x.item() == 6
        x = self.own(1)
        dist.broadcast(x, src=self.rank // 2 * 2 + 1, group=group)
        assert x.item() == (2 if self.rank < 2 else 4)
        dist.barrier()

    def objects(self) -> None:
        """Of different sizes."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, "x" * 1000 * self.rank)
        assert [len(text) for text in found] == [0, 1000, 2000, 3000]
        several = ["y" * 50, {"rank": 1}] if self.rank == 1 else [None, None]
        dist.broadcast_object_list(several, src=1)
        assert several[1] == {"rank": 1}
        gathered: list[Any] | None = [None] * self.world if self.rank == 2 else None
        dist.gather_object("z" * self.rank, gathered, dst=2)
        assert gathered == (["", "z", "zz", "zzz"] if self.rank == 2 else None)

    def every_collective(self) -> None:
        world, whole = self.world, [1.0, 2.0, 3.0, 4.0]
        parts = [self.own(1) for _ in range(world)]
        dist.all_gather(parts, self.own(1))
        assert [part.item() for part in parts] == whole
        value = self.own(world)
        dist.all_gather_into_tensor(value, self.own(1))
        assert value.tolist() == whole
        gathered = [self.own(1) for _ in range(world)] if self.rank == 2 else None
        dist.gather(self.own(1), gathered, dst=2)
        assert gathered is None or [part.item() for part in gathered] == whole
        rows = [self.own(2) + row for row in range(world)]
        value = self.own(2)
        dist.reduce_scatter_tensor(value, torch.cat(rows))
        assert value.tolist() == [10 + 4 * self.rank] * 2
        dist.reduce_scatter(value, rows, op=dist.ReduceOp.AVG)
        assert value.tolist() == [2.5 + self.rank] * 2
        dist.scatter(value, rows if self.rank == 3 else None, src=3)
        assert value.tolist() == [4 + self.rank] * 2
        value = self.own(world)
        dist.all_to_all_single(value, self.own(world))
        assert value.tolist() == whole
        with dist._coalescing_manager():
            values = [self.own(world) for _ in range(2)]
            for each in values:
                dist.all_gather_into_tensor(each, self.own(1))
        assert values[1].tolist() == whole

    def columns(self) -> None:
        """Tensors whose elements do not lie next to each other."""
        whole, column = [1.0, 2.0, 3.0, 4.0], self.own(3, 2)[:, 0]
        for parts in ([self.own(3) for _ in whole], [self.own(3, 2)[:, 1] for _ in whole]):
            dist.all_gather(parts, column)
            assert [part[2].item() for part in parts] == whole
        dist.gather(column, parts if self.rank == 1 else None, dst=1)
        dist.scatter(column, parts if self.rank == 2 else None, src=2)
        assert column.tolist() == [self.rank + 1] * 3
        value = self.own(12)
        dist.all_gather_into_tensor(value, column)
        assert value[::3].tolist() == whole
        if self.device == "tpu":  # gloo itself mixes up the numbers of such a tensor (torch 2.9)
            dist.broadcast(column, 3)
            assert column.tolist() == [4, 4, 4]
            dist.all_reduce(column)
            assert column.tolist() == [16, 16, 16]

    def different_parts(self) -> None:
        sizes = [rank + 1 for rank in range(self.world)]
        sent = self.own((self.rank + 1) * self.world, 2)
        received = self.own(sum(sizes), 2)
        dist.all_to_all_single(received, sent, sizes, [self.rank + 1] * self.world)
        assert received[:, 1].tolist() == [size for size in sizes for _ in range(size)]
        parts = [self.own(size) for size in sizes]
        if self.device == "tpu":  # gloo wants lists of equal tensors, if it takes lists at all
            dist.all_to_all(parts, [self.own(self.rank + 1) for _ in range(self.world)])
            assert [part.tolist() for part in parts] == [[size] * size for size in sizes]

    def pairs(self) -> None:
        """Sends that some ranks make, and receives that begin before a collective."""
        before, after = (self.rank - 1) % self.world, (self.rank + 1) % self.world
        x, y = self.own(3), self.own(3)
        if self.rank == 0:
            dist.send(x, 1)
        elif self.rank == 1:
            dist.recv(y, 0)
            assert y.tolist() == [1, 1, 1]
        received = dist.irecv(y, before)
        dist.barrier()
        dist.isend(x, after).wait()
        received.wait()
        assert y[0].item() == before + 1
        operations = [dist.P2POp(dist.isend, 2 * x, after), dist.P2POp(dist.irecv, y, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert y[0].item() == 2 * (before + 1)

    def types(self) -> None:
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64):
            x = self.own(3, dtype=dtype)
            dist.all_reduce(x)
            assert (x.dtype, x.tolist()) == (dtype, [10] * 3)
            dist.all_reduce(x, op=dist.ReduceOp.MIN)
            x = self.own(1, dtype=dtype)[0]
            dist.broadcast(x, 2)
            assert x.item() == 3
        flags = torch.tensor([self.rank == 1, False], device=self.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        assert flags.tolist() == [True, False]
        x = self.own(2, dtype=torch.complex64)
        dist.all_reduce(x)
        assert x.tolist() == [10, 10]

    def types_that_gloo_lacks(self) -> None:
        """A TPU has them. On the CPU they are refused, and the next call is right."""
        for dtype in (torch.int16, torch.float8_e4m3fn):
            x = torch.full((4,), self.rank + 1.0).to(dtype).to(self.device)
            calls: list[Callable[[], Any]] = [
                lambda x=x: dist.broadcast(x, 1),
                lambda x=x: dist.all_reduce(x),
                lambda x=x: dist.reduce_scatter_tensor(x[:1].clone(), x),
            ]
            for call in calls:
                if self.device == "tpu":
                    call()
                else:
                    with pytest.raises(RuntimeError) as refused:
                        call()
                    assert not isinstance(refused.value, CollectiveError)
            if self.device == "tpu":
                assert x.float().tolist() == [8, 8, 8, 8]
        self.from_different_lines()

    def without_gradients(self) -> None:
        with torch.inference_mode():
            x = self.own(2)
            dist.all_reduce(x)
            assert x.tolist() == [10, 10]
        parameter = nn.Parameter(self.own(2))
        dist.all_reduce(parameter)
        dist.broadcast(parameter, 0)
        assert parameter.tolist() == [10, 10]

    def large(self) -> None:
        """Over gloo, not in the memory that the ranks share."""
        x = self.own(3_000_000)
        dist.all_reduce(x)
        assert x[-1].item() == 10

    def joined(self) -> None:
        """Ranks with different numbers of batches, as DDP allows them."""
        model = DistributedDataParallel(nn.Linear(3, 2).to(self.device))
        with model.join():
            for _ in range(2 + self.rank):
                model(self.own(4, 3)).sum().backward()

    def functional(self) -> None:
        from torch.distributed import _functional_collectives as functional

        everyone = dist.group.WORLD
        assert everyone is not None
        assert functional.all_reduce(self.own(2), "sum", everyone).tolist() == [10, 10]
        assert functional.all_gather_tensor(self.own(1), 0, everyone).tolist() == [1, 2, 3, 4]
        value = functional.reduce_scatter_tensor(self.own(4), "avg", 0, everyone)
        assert value.tolist() == [2.5]

    def a_group_of_its_own(self) -> None:
        dist.destroy_process_group()
        backend = BACKENDS[self.device]
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        x = self.own(2)
        dist.all_reduce(x)
        dist.barrier()
        assert x.tolist() == [self.rank + 1] * 2


def right(device: str, program: str) -> int:
    rank, world = rehearse_on(device)
    getattr(Programs(rank, world, device), program)()
    calls = sum(row.calls for row in collective_stats.collectives(rank))
    leave_rehearsal()
    end_rehearsal()
    time.sleep(0.5)  # gloo of a rank that is slower still reads
    return calls


PROGRAMS = [name for name in vars(Programs) if not name.startswith("_") and name != "own"]


@on_each_device
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_right_program_runs(ranks: Ranks, device: str, program: str) -> None:
    for calls in ranks.values(right, 4, device, program):
        assert calls >= 1  # init_process_group


def shapes(device: str) -> str:
    rank, _ = rehearse_on(device)
    x = torch.ones([] if rank else [1], device=device)
    try:
        dist.all_reduce(x)
    except CollectiveError as error:
        return str(error)
    return str(x.sum().item())


def test_gloo_compares_sizes_and_a_tpu_shapes(ranks: Ranks) -> None:
    assert ranks.values(shapes, 2, "cpu") == ["2.0", "2.0"]
    for message in ranks.values(shapes, 2, "tpu"):
        assert "rank 1: all_reduce sum of float32[] on tpu" in message


def sums(device: str) -> bytes:
    rank, _ = rehearse_on(device)
    torch.manual_seed(rank)
    x = torch.randn(1000, dtype=torch.float32).to(device)
    dist.all_reduce(x)
    return x.cpu().numpy().tobytes()


@on_each_device
def test_sums_are_equal_on_all_ranks(ranks: Ranks, device: str) -> None:
    assert len(set(ranks.values(sums, 4, device))) == 1


def freed(device: str) -> int:
    """Train, destroy the group, and free the model, which was the last to hold it."""
    rehearse_on(device)
    dist.destroy_process_group()

    def train() -> None:
        dist.init_process_group(BACKENDS[device])
        model = DistributedDataParallel(nn.Linear(8, 1).to(device))
        for _ in range(4):
            model(torch.ones(2, 8, device=device)).sum().backward()
            parts = [torch.empty(1, device=device) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, torch.ones(1, device=device))
        dist.barrier()
        dist.destroy_process_group()

    for _ in range(40):
        train()
    return collective_stats.collectives(0)[0].calls


@on_each_device
def test_a_model_that_is_freed_after_its_group_does_not_wait_for_it(
    ranks: Ranks, device: str
) -> None:
    assert all(calls > 40 for calls in ranks.values(freed, 2, device))
