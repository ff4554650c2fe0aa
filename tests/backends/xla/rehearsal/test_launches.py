"""Errors if a rank would run a program with a collective alone on a TPU, and no false ones."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse
from tpunb.backends.rehearsal.errors import CollectiveError, LaunchMismatchError

# Functions without `test_` run in ranks; each is followed by the test that calls it.


class Step:
    """One step of a training, to which the cases below add something."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.master = rank == 0
        self.device = torch_xla.device()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        torch_xla.sync()

    def backward(self) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(torch.full((3, 4), 1.0 + self.rank).to(self.device)).square().mean()
        loss.backward()
        return loss.detach()

    def update(self, **options: Any) -> Any:
        loss = self.backward()
        xm.optimizer_step(self.optimizer, **options)
        return loss


def reads_a_sum(step: Step, read: Callable[[Any], object]) -> None:
    for _ in range(2):
        total = xm.all_reduce("sum", step.update(), scale=0.5)
        if step.master:
            read(total)
        torch_xla.sync()


def copies_weights(step: Step, copied: Callable[[Any], object], later: bool = False) -> None:
    for _ in range(2):
        loss = step.update()
        if later:
            xm.all_reduce("sum", [loss])
        if step.master:
            copied(step.model)
        torch_xla.sync()


def prints_a_gradient_norm(step: Step) -> None:
    for _ in range(2):
        step.backward()
        xm.reduce_gradients(step.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
        if step.master:
            print(f"norm {norm:.2f}")
        step.optimizer.step()
        torch_xla.sync()


def syncs_alone(step: Step) -> None:
    for _ in range(2):
        loss = step.update(barrier=step.master)
        xm.all_reduce("sum", loss)
        torch_xla.sync()


def never_syncs(step: Step) -> None:
    for number in range(3):
        loss = step.update()  # depends on the gradients of the step before
        if step.master and number:
            loss.item()


def master_prints(step: Step) -> None:
    reads_a_sum(step, lambda total: xm.master_print(total))


def state_on_cpu(model: Any) -> dict[str, Any]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


MISTAKES: dict[str, Callable[[Step], None]] = {
    "item": lambda step: reads_a_sum(step, lambda total: total.item()),
    "format": lambda step: reads_a_sum(step, lambda total: print(f"{total:.3f}")),
    "condition": lambda step: reads_a_sum(step, lambda total: "low" if total < 1 else "high"),
    "to": lambda step: reads_a_sum(step, lambda total: total.to("cpu")),
    "derived": lambda step: reads_a_sum(step, lambda total: float(total / 4 + 1)),
    "tolist": lambda step: reads_a_sum(step, lambda total: total.view(1).tolist()),
    "master_print": master_prints,
    "state dict": lambda step: copies_weights(step, state_on_cpu),
    "deepcopy": lambda step: copies_weights(step, lambda model: copy.deepcopy(model).to("cpu")),
    "later weights": lambda step: copies_weights(step, state_on_cpu, later=True),
    "norm": prints_a_gradient_norm,
    "barrier": syncs_alone,
    "no sync": never_syncs,
}


def mistakes(names: list[str]) -> dict[str, str]:
    rank, _ = rehearse()
    from tpunb.backends.xla.rehearsal.launches import launches

    found = {}
    for name in names:
        found[name] = ""
        try:
            MISTAKES[name](Step(rank))
            xm.rendezvous("behind it")
        except LaunchMismatchError as error:
            found[name] = str(error)
        launches.__init__()  # type: ignore[misc]
    return found


def test_mismatched_graph_execution_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    first, other = ranks.values(mistakes, 2, list(MISTAKES))
    assert [name for name in MISTAKES if not (first[name] and other[name])] == []
    for name in ("item", "barrier"):
        assert first[name] == other[name]
    assert "rank 0: reads a value" in first["item"]
    assert "rank 1: calls torch_xla.sync()" in first["item"]
    assert "total.item())" in first["item"]
    assert "rank 0: calls torch_xla.sync()" in first["barrier"]


def legal() -> list[str]:
    rank, world = rehearse()
    from tpunb.backends.rehearsal import errors
    from tpunb.backends.rehearsal.install import end_rehearsal

    said: list[str] = []
    errors.print_warning = said.append
    step = Step(rank)
    for number in range(3):
        loss = step.update()
        if step.master:
            loss.item()  # of this rank alone
            print(loss)
        own = torch.ones(3, device=step.device) * (rank + 2)
        if rank == 1:
            own.sum().item()
        total: Any = xm.all_reduce("sum", loss)
        value = total.item()  # on every rank, then it is a value
        if step.master:
            print(f"{total:.3f}", float(total / world), total.cpu(), value)
            if total < 1e9:
                (own * 3).tolist()
        gathered = xm.all_gather(own)
        if rank == 1:  # the same program as the others', after their next call of a collective
            mean = gathered.mean().item()
        xm.all_reduce("max", [own * 2])
        if rank != 1:
            mean = gathered.mean().item()
        assert mean
        xm.add_step_closure(lambda x: x.item() if rank == 0 else None, args=(total * 2,))
        torch_xla.sync()
        if step.master:
            {name: weight.cpu() for name, weight in step.model.state_dict().items()}
            gathered.tolist()
        if rank == 2 and number == 1:  # evaluates alone
            with torch.no_grad():
                step.model(torch.ones(5, 4).to(step.device)).mean().item()
            torch_xla.sync()
    path = os.path.join(tempfile.gettempdir(), f"{os.getpid()}.pt")
    step.update()
    xm.save(step.model.state_dict(), path)  # computes on all, writes on one
    if os.path.exists(path):
        os.remove(path)
    torch_xla.sync()
    end_rehearsal()
    return said


def test_no_mismatch_for_executions_equal_or_not_needed(ranks: Ranks) -> None:
    assert ranks.values(legal, 3) == [[]] * 3


def ends(kind: str) -> str:
    rank, _ = rehearse()
    import time

    from tpunb.backends.rehearsal.install import end_rehearsal

    x = torch.ones(2, device=torch_xla.device())
    xm.rendezvous("all are here")
    if kind == "read":
        total: Any = xm.all_reduce("sum", x)
        if rank == 0:
            total.sum().item()
    elif kind == "swallowed":
        with contextlib.suppress(Exception):
            xm.all_reduce("sum", x[: rank + 1])
        xm.all_reduce("sum", x)
    elif kind == "thread" and rank == 1:
        import threading

        threading.Thread(target=xm.all_reduce, args=("sum", x), daemon=True).start()
        time.sleep(0.5)
    torch_xla.sync()
    try:
        end_rehearsal()
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("kind", "error", "least"),
    [
        ("read", "LaunchMismatchError: the ranks run different programs", 1),
        ("swallowed", "MismatchError: the ranks called different collectives", 2),
        ("thread", "PeerLostError: rank 0 has returned from the train cell", 1),
        ("nothing", "", 2),
    ],
)
def test_collective_errors_are_reported_at_the_end_of_the_rehearsal(
    ranks: Ranks, kind: str, error: str, least: int
) -> None:
    told = ranks.values(ends, 2, kind)
    assert sum(text.startswith(error) and bool(text) == bool(error) for text in told) >= least


def described(count: int, *launches: tuple[str, int, bool]) -> str:
    return json.dumps([count, [(kind, last, more, "") for kind, last, more in launches]])


R, S = "READ", "SYNC"


@pytest.mark.parametrize(
    ("one", "other", "now", "at_the_end"),
    [
        ([(S, 1, True)], [(S, 1, True)], None, None),
        ([(S, 1, True)], [], None, True),
        ([(R, 1, False), (S, 1, True)], [(S, 1, True)], True, True),
        ([(R, 1, False)], [(S, 1, False)], False, False),
        ([(R, 1, False), (S, 2, True)], [(R, 2, False), (S, 2, True)], True, True),
        ([(R, 1, False), (R, 2, False)], [(R, 1, False)], None, True),
    ],
)
def test_mismatch_compares_only_executions_of_all_ranks(
    one: Any, other: Any, now: bool | None, at_the_end: bool | None
) -> None:
    from tpunb.backends.xla.rehearsal.launches import find_difference

    texts = {0: described(len(one), *one), 1: described(len(other), *other)}
    for final, certain in ((False, now), (True, at_the_end)):
        found = find_difference(texts, final=final)
        assert (found and found.certain) == certain
    # Only the end of a long list is sent: the missing rest is not a difference.
    long = {0: described(30, (S, 9, True), *one), 1: described(30, *one)}
    assert find_difference(long, final=True) is None
