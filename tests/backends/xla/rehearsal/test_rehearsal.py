"""Rehearsal ranks in real processes: errors, interrupts, threads and children."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.drivers.lazy import torch_xla, xm, xr
from tests.drivers.ranks import Ranks, rehearse
from tpunb.backends.rehearsal import errors
from tpunb.backends.rehearsal.errors import MismatchError, NotRehearsedError

# Functions without `test_` run in ranks; each is followed by the test that calls it.


def asked_before_the_fork() -> int:
    assert xr.world_size() == 1  # torch_xla keeps this answer
    rehearse()
    return xr.world_size()


def test_world_size_asked_before_the_fork_is_not_cached(ranks: Ranks) -> None:
    assert ranks.values(asked_before_the_fork, 2) == [2, 2]


def step_closures() -> tuple[list[str], list[str], bool]:
    rehearse()
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


def disagreeing() -> dict[str, str]:
    """The error of each call in which the ranks differ."""
    rank, world = rehearse()
    device = torch_xla.device()
    x, square = torch.ones(3, device=device), torch.ones(3, 3, device=device)
    functional = torch.ops._c10d_functional
    sizes = range(1, 60) if rank else [*range(1, 17), 99, *range(18, 60)]
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: xm.all_reduce("sum", torch.ones(5, device=device) if rank == 1 else x),
        "operation": lambda: xm.rendezvous("epoch") if rank == 2 else xm.all_reduce("max", x),
        "groups": lambda: xm.all_reduce("sum", x, groups=[[0, 1, 2]] if rank else [[0, 1], [2]]),
        "root": lambda: xm.collective_broadcast([x], root_ordinal=rank // 2),
        "list": lambda: xm.all_reduce("sum", [torch.ones(n, device=device) for n in sizes], 0.5),
        "scatter": lambda: xm.reduce_scatter("sum", square, 1.0 + rank, 0, world),
        "to all": lambda: xm.all_to_all(square, rank % 2, 0, world),
        # Rank 2 is in no pair of its own, and still takes part.
        "permute": lambda: xm.collective_permute(x, [[0, 1]] if rank else [[0, 1], [1, 2]]),
        "functional": lambda: functional.reduce_scatter_tensor(
            square, "max" if rank else "min", world, ""
        ),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(MismatchError) as raised:
            call()
        found[name] = str(raised.value)
        # The ranks still agree.
        assert xm.all_reduce("sum", torch.ones(1, device=device)).item() == world
    return found


MISMATCHES = {
    "shape": [
        r"ranks 0, 2: all_reduce sum of float32\[3\]\n +line \d+ of test_rehearsal.py: ",
        r"rank 1: all_reduce sum of float32\[5\]",
    ],
    "operation": [r"ranks 0, 1: all_reduce max of float32\[3\]", r"rank 2: rendezvous 'epoch'\n"],
    "groups": [
        r"rank 0: all_reduce sum of float32\[3\], groups \[\[0, 1\], \[2\]\]",
        r"ranks 1, 2: all_reduce sum of float32\[3\], groups \[\[0, 1, 2\]\]",
    ],
    "root": [
        r"ranks 0, 1: all_reduce sum of float32\[3\], broadcast from rank 0\n",
        r"rank 2: all_reduce sum of float32\[3\], broadcast from rank 1\n",
    ],
    "list": [
        r"rank 0: all_reduce sum of 59 tensors \(.*\), scale 0.5, tensor 17 is float32\[99",
        r"ranks 1, 2: .*tensor 17 is float32\[17\]",
    ],
    "scatter": [r"rank 1: reduce_scatter sum of .*, dim 0, scale 2"],
    "to all": [r"rank 1: all_to_all of float32\[3, 3\], from dim 1 to 0"],
    "permute": [
        r"rank 0: collective_permute of float32\[3\], pairs \[\[0, 1\], \[1, 2\]\]",
        r"ranks 1, 2: collective_permute of float32\[3\], pairs \[\[0, 1\]\]",
    ],
    "functional": [r"rank 0: reduce_scatter min", r"ranks 1, 2: reduce_scatter max"],
}


def test_mismatch_error_on_every_rank_lists_the_calls(ranks: Ranks) -> None:
    for found in ranks.values(disagreeing, 3):
        assert found.keys() == MISMATCHES.keys()
        for name, expected in MISMATCHES.items():
            for text in expected:
                assert re.search(text, found[name]), found[name]


def refused() -> dict[str, str]:
    """The error of each call that would fail on a TPU."""
    _, world = rehearse()
    x = torch.ones(4, 4, device=torch_xla.device())
    whole = x.long()
    calls: dict[str, Callable[[], object]] = {
        "one tensor of a type": lambda: xm.all_gather([x, whole], pin_layout=False),
        "empty list": lambda: xm.all_gather([], pin_layout=False),
        "empty tensor": lambda: xm.all_gather([x[:0]], pin_layout=False),
        "shares": lambda: xm.reduce_scatter("sum", x[1:], 1.0, 0, world),
        "count of shares": lambda: xm.reduce_scatter("sum", x, 1.0, 0, 4),
        "split": lambda: xm.all_to_all(x, 0, 0, 4),
        "dimension": lambda: xm.all_to_all(x, -1, 0, world),
        "pairs": lambda: xm.collective_permute(x, [[0, 1], [0, 0]]),
        "ranks": lambda: xm.collective_permute(x, [[0, 2]]),
        "reduce type": lambda: xm.all_reduce("avg", x),
        "bits of floats": lambda: xm.all_reduce("and", x),
        "groups that overlap": lambda: xm.all_reduce("sum", x, groups=[[0], [0, 1]]),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - looked at below
            call()
        found[name] = str(raised.value)
    assert xm.all_reduce("sum", x)[0, 0].item() == world
    return found


GROUPS = "XLA accepts only non-empty groups that name each of the 2 ranks"
REFUSED = {
    "one tensor of a type": "torch_xla crashes if a list has a single tensor",
    "empty list": "torch_xla crashes with an empty list",
    "empty tensor": "torch_xla fails with an empty tensor in this call",
    "shares": "dimension 0 of [3, 4] cannot be split into 2 equal shares",
    "count of shares": "shard_count is 4, but the group has 2 ranks",
    "split": "split_count is 4, but the group has 2 ranks",
    "dimension": "split_dimension -1 is not in 0 … 1",
    "pairs": "XLA accepts each rank once as a source and once as a target",
    "ranks": "only ranks 0 … 1 exist",
    "reduce type": "there is no reduce type 'avg'",
    "bits of floats": "'and' needs bool or integer tensors",
    "groups that overlap": GROUPS,
}


def test_collective_arguments_that_fail_on_a_tpu_are_explained(ranks: Ranks) -> None:
    for found in ranks.values(refused, 2):
        assert found.keys() == REFUSED.keys()
        assert [name for name, text in REFUSED.items() if text not in found[name]] == []


def wait_for(*files: str) -> None:
    deadline = time.monotonic() + 100
    while not all(os.path.exists(file) for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def late(when: str, folder: str) -> tuple[str, str]:
    from tpunb.backends.rehearsal import waiting, wire

    assert wire.TIMEOUT == 300.0
    rank, _ = rehearse(timeout=3.0, times=waiting.WaitTimes(inquiry=0.5))

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
    from tpunb.backends.rehearsal import waiting

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
    from tpunb.backends.xla import private_names

    x = torch.ones(4, 4, device=torch_xla.device())
    for call in (
        lambda: xm.send(x, 0),
        lambda: xm.recv(x, 0),
        lambda: xm.all_reduce("sum", x.to(torch.float8_e5m2)),
    ):
        with pytest.raises(NotRehearsedError, match="is not rehearsed on CPU cores"):
            call()
    xlac = [name for name in private_names.NAMES if name.owner == private_names.XLAC]
    refused = [name.name for name in xlac if name.kind == "refused"]
    assert len(refused) >= 4
    for name in refused:
        with pytest.raises(NotRehearsedError, match=rf"^{name} is not rehearsed"):
            getattr(torch_xla._XLAC, name)()


def test_calls_that_are_not_rehearsed_are_explained(ranks: Ranks) -> None:
    ranks.values(not_rehearsed, 2)


def reduced_in_a_thread() -> list[float]:
    rehearse()
    import threading

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
    from tpunb.backends.rehearsal import install
    from tpunb.backends.rehearsal.call import RankCall

    xm.all_reduce("sum", torch.ones(1, device=torch_xla.device()))
    # XLA itself would hang in a child: only the wire is used.
    wire = install._wire
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with wire.exchange(RankCall("rendezvous"), [0, 1]):
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


def gathered_and_deleted() -> bool:
    rehearse()
    from torch.multiprocessing.reductions import StorageWeakRef

    from tpunb.backends.rehearsal import install
    from tpunb.backends.rehearsal.call import RankCall

    wire, call = install._wire, RankCall("all_gather")
    value = torch.ones(8)
    storage = StorageWeakRef(value.untyped_storage())
    with wire.exchange(call, [0, 1], value):
        wire.all_gather(value, [0, 1], call)
    del value
    return storage.expired()


def test_what_a_collective_has_sent_is_free_when_it_is_done(ranks: Ranks) -> None:
    assert ranks.values(gathered_and_deleted, 2) == [True, True]


def quiet() -> None:
    rehearse()
    os.write(1, b"before\n")
    xm.rendezvous("first")
    os.write(1, b"after\n")


def test_gloo_writes_nothing_to_stdout(ranks: Ranks) -> None:
    assert [ended.output for ended in ranks.run(quiet, 2)] == 2 * ["before\nafter\n"]


def without_a_store() -> str:
    from tpunb.errors import SetupError

    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    with pytest.raises(SetupError) as raised:
        rehearse()
    return str(raised.value)


def test_missing_torch_elastic_store_is_explained(ranks: Ranks) -> None:
    assert "TORCHELASTIC_USE_AGENT_STORE is not True" in ranks.values(without_a_store, 1)[0]
