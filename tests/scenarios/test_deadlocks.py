"""What would hang on a TPU is caught within seconds, with rank, cell and line."""

from __future__ import annotations

import re
from textwrap import indent

import pytest

from tests.support import Driver, Seen

START = """\
import os, pathlib, threading, time, torch, torch_xla
import torch_xla.core.xla_model as xm
def ones(*shape, **kind):
    return torch.ones(*shape, device=torch_xla.device(), **kind)
def begun_with_the_others():
    folder, rank = pathlib.Path(os.environ["TPUNB_RUN"]), int(os.environ["RANK"])
    (folder / f"here-{rank}").touch()
    while len(list(folder.glob("here-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    return rank
"""
# So those that leave together do so within the time in which they are named together.
RANK = "rank = begun_with_the_others()\n"


def failed(driver: Driver, train: str, ranks: int = 3) -> Seen:
    """A run that fails by itself: nothing of the supervisor's ends it earlier than its patience."""
    seen = driver.run([START], RANK + train, ranks=ranks, grace=1.0, hang_timeout=120.0)
    assert seen.result.state == "failed", seen.log
    assert seen.seconds < 60.0, "this was the supervisor's patience, not the wire's"
    return seen


def says(seen: Seen, *texts: str) -> None:
    failure = seen.result.failure
    assert failure is not None
    for text in texts:
        assert re.search(text, f"{failure.headline()}\n{failure.message}"), failure.message


@pytest.mark.parametrize(
    ("train", "texts"),
    [
        pytest.param(
            'for batch in range(3 if rank == 1 else 4):\n    xm.all_reduce("sum", [ones(3)])',
            [
                r"^rank [02] failed in cell \[2\], line 3: PeerLostError: ",
                r"rank 1 has returned from the train cell while rank [02] waited in all_reduce "
                r"sum of float32\[3\]: this is the 4th collective of rank [02], but rank 1 took "
                r"part in 3, the last at cell \[2\], line 3: xm\.all_reduce\(",
                "Does one rank have fewer batches",
            ],
            id="unequal batches",
        ),
        pytest.param(
            "if rank == 0:\n"
            '    xm.all_reduce("sum", [ones(3)])\n'
            "for batch in range(4):\n"
            '    xm.all_reduce("sum", [ones(3)])',
            [
                r"^rank 0 failed in cell \[2\], line 5: PeerLostError: ranks 1, 2 have returned",
                r"The first collective that the ranks called from different lines:\n"
                r"  rank 0: collective 1, at cell \[2\], line 3: xm.all_reduce\(.*\n"
                r"  ranks 1, 2: collective 1, at cell \[2\], line 5: xm.all_reduce\(",
            ],
            id="a conditional collective that meets another of the same kind",
        ),
        pytest.param(
            """\
try:
    if rank == 1:
        raise ValueError("the cause")
    xm.all_reduce("sum", ones(3))
finally:
    xm.rendezvous("end")
""",
            [
                r"rank 1: rendezvous 'end'\n +cell \[2\], line 7: xm\.rendezvous\(\"end\"\)\n"
                r" +after ValueError: the cause\n"
                r" +cell \[2\], line 4: raise ValueError\(\"the cause\"\)"
            ],
            id="an exception that a collective in finally hides",
        ),
        pytest.param(
            """\
def reduce(number):
    xm.all_reduce("sum", ones(number))
threads = [threading.Thread(target=reduce, args=(number,), name=f"T{number}") for number in (3, 4)]
for thread in threads[:: -1 if rank == 1 else 1]:
    thread.start()
    time.sleep(0.2)
""",
            [
                r"ranks 0, 2: all_reduce sum of float32\[3\]\n.*\n +in thread T3",
                r"rank 1: all_reduce sum of float32\[4\]\n.*\n +in thread T4",
            ],
            id="threads in another order",
        ),
    ],
)
def test_deadlock_or_mismatch_error_names_ranks_and_lines(
    driver: Driver, train: str, texts: list[str]
) -> None:
    says(failed(driver, train), *texts)


def test_deadlock_inside_torch_xla_launch_counts_collectives(driver: Driver) -> None:
    train = "def main(index):\n" + indent(
        'for batch in range(5 - index):\n    xm.all_reduce("sum", [ones(3)])', "    "
    )
    seen = failed(driver, train + "\ntorch_xla.launch(main)", ranks=2)
    says(
        seen,
        r"^rank 0 failed in cell \[2\], line 4: PeerLostError: rank 1 has returned",
        r"this is the 5th collective of rank 0, but rank 1 took part in 4",
    )
