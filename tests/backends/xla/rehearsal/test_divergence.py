"""Warnings if the ranks' programs differ around a collective, and none if they differ elsewhere."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.drivers.lazy import torch_xla, xm
from tests.drivers.ranks import Ranks, rehearse
from tests.support import Driver
from tpunb.backends.rehearsal.call import RankCall

GRAPH = """IR {
  %0 = f32[17,784]{1,0} xla::device_data(), xla_shape=f32[17,784]{1,0}
  %1 = f32[] prim::Constant(), xla_shape=f32[]
  %2 = (f32[], f32[2,3]{1,0}) aten::max(%0, %1), num_outputs=2
  %3 = f32[17,784]{1,0} aten::mul(%0, %1), xla_shape=f32[17,784]{1,0}, ROOT=0
}"""


def test_graph_outline_and_hash() -> None:
    from tpunb.backends.xla.rehearsal.divergence import Outline

    outline = Outline.parse(GRAPH)
    assert outline.inputs == {"f32[17,784]": 1}
    assert outline.operations == {"prim::Constant": 1, "aten::max": 1, "aten::mul": 1}
    assert outline.results["aten::mul f32[17,784]"] == 1
    assert outline.hash() == Outline.parse(GRAPH.replace("%1)", "%1), value=3")).hash()
    assert outline.hash() != Outline.parse(GRAPH.replace("f32[]", "f32[1]")).hash()
    computed = "  %0 = f32[3]{0} xla::device_data(), xla_shape=f32[3]{0}, ROOT=0"
    assert Outline.parse(computed) == Outline({}, {}, {})
    assert Outline.parse(computed).hash() == 1


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (
            ({"a": 1}, {"f32[3]": 1}),
            ({"a": 1}, {"f32[4]": 2}),
            "reads f32[3] where the others read 2 × f32[4]",
        ),
        (({"a": 3}, {}), ({"a": 1, "b": 1}, {}), "has in addition 2 × a; is missing b"),
        (
            ({"a": 1}, {}, {"a f32[3]": 1}),
            ({"a": 1}, {}, {"a f32[4]": 1}),
            "has in addition a f32[3]; is missing a f32[4]",
        ),
        (({}, {"x": 1}), ({"a": 1}, {}), "it had computed these tensors before"),
        ((dict.fromkeys("abcdef", 1), {}), ({"a": 1}, {}), "has in addition b, c, d, e and 1 more"),
    ],
)
def test_graph_difference_in_words(one: Any, other: Any, words: str) -> None:
    from tpunb.backends.xla.rehearsal.divergence import Outline

    assert words in Outline(*one).difference(Outline(*other))


def trained(*kinds: str) -> list[str]:
    """Four steps of training, with differences on some ranks."""
    rank, _ = rehearse()
    import torch.nn.functional as F  # noqa: N812

    from tpunb.backends.rehearsal import errors

    said: list[str] = []
    errors.print_warning = said.append
    device, last = torch_xla.device(), rank == 2
    alone = {kind for kind in kinds if rank == 0}
    torch.manual_seed(rank)
    xm.set_rng_state(rank + 7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout(0.5)).to(device)
    if "load" in alone:
        model.load_state_dict({k: v.cpu() + 1 for k, v in model.state_dict().items()})
    xm.broadcast_master_param(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        rows = 3 if "batch" in kinds and last and step == 3 else 4
        x, y = torch.rand(rows, 6), torch.arange(rows) % 3
        optimizer.zero_grad()
        if "slice" in kinds:
            out = model(torch.cat([x] * 3).to(device)[rank * rows : (rank + 1) * rows])
        else:
            out = model(x.to(device))
        loss = F.cross_entropy(out, y.to(device))
        if "operation" in kinds and last and step > 1:
            loss = loss + out.abs().mean()
        if "ordinal" in kinds:
            loss = loss * (rank + 2) / (rank + 5)
        if "read before backward" in alone:
            loss.item()
        loss.backward()
        if "sync" in kinds and last and step == 2:
            torch_xla.sync()
        if "read after backward" in alone:
            loss.item()
        if "pending" in alone:
            kept = loss.detach() * 2  # noqa: F841 - not computed when the gradients are read
        xm.reduce_gradients(optimizer)
        if "decay" in kinds and last:
            optimizer.param_groups[0]["weight_decay"] = 0.3
        if not ("no step" in kinds and last):
            optimizer.step()
        torch_xla.sync()
        if "fine-tune" in alone:
            model(torch.rand(9, 6).to(device)).sum().backward()
            torch.optim.Adam(model.parameters(), lr=0.0).step()
            torch_xla.sync()
        if "evaluate" in alone:
            with torch.no_grad():
                model.eval()
                model(torch.rand(9, 6).to(device)).argmax(1).sum().item()
                model.train()
            torch_xla.sync()
        if "save" in alone:
            assert len({k: v.cpu() for k, v in model.state_dict().items()}) == 2
        xm.rendezvous("saved")
        xm.all_reduce("sum", loss.detach())
        if "gather" in kinds:
            xm.all_gather(out.detach().argmax(1))
    return said


IN_STEP = "in the optimizer's step before rendezvous 'saved' the ranks run"
REDUCTION = r"at line \d+ of .*: xm.reduce_gradients\(optimizer\)\n"
STEP = r"at line \d+ of .*: optimizer.step\(\)\n"
NO_STEP = r"no step, or one after torch_xla.sync\(\)\n"


@pytest.mark.parametrize(
    ("kind", "first", "others", "last", "words"),
    [
        (
            "batch",
            "in all_reduce",
            *2 * [REDUCTION],
            "reads f32[3,6], s64[3] where the others read f32[4,6], s64[4]",
        ),
        ("operation", "in all_reduce", *2 * [REDUCTION], "has in addition aten::"),
        ("sync", "in all_reduce", *2 * [REDUCTION], "it had computed these tensors before"),
        ("decay", IN_STEP, *2 * [STEP], "has in addition 2 × aten::add"),
        ("no step", IN_STEP, STEP, NO_STEP, "This is collective 3 (after "),
    ],
)
def test_divergence_of_one_rank_is_named_once(
    ranks: Ranks, kind: str, first: str, others: str, last: str, words: str
) -> None:
    (told,), *silent = ranks.values(trained, 3, kind)
    assert silent == [[], []]  # one rank says it for all
    assert told.startswith(first), told
    assert re.search(f"ranks 0, 1: {others}", told), told
    assert re.search(f"rank 2: {last}", told), told
    assert words in told


@pytest.mark.parametrize(
    "kinds",
    [
        ["ordinal", "load", "read after backward", "pending", "save", "gather"],
        ["read before backward", "evaluate", "slice", "fine-tune"],
    ],
    ids=" ".join,
)
def test_no_divergence_for_work_a_rank_may_do_alone(ranks: Ranks, kinds: list[str]) -> None:
    assert ranks.values(trained, 3, *kinds) == [[], [], []]


def test_divergence_of_tensor_names_in_words() -> None:
    from tpunb.backends.xla.rehearsal.divergence import NamedTensors

    many = NamedTensors([f"w{number}" for number in range(9)], ["x"])
    assert NamedTensors().difference(NamedTensors()) == ""
    assert many.difference(NamedTensors(["w0"], ["x", "y"])) == (
        "takes w1, w2, w3, w4, w5, w6 and 2 more, the others nothing; reads nothing, the others y"
    )


def reduced(how: str) -> list[str]:
    """Gradients of two parameters of one shape, reduced one after the other."""
    rank, _ = rehearse()
    from tpunb.backends.rehearsal import errors

    said: list[str] = []
    errors.print_warning = said.append
    torch.manual_seed(0)
    if how == "aliases" and rank == 1:
        best: Any = None
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model.to(torch_xla.device())
    if how == "aliases" and rank == 1:
        best = model  # noqa: F841
    a, b = (layer.weight for layer in model)  # type: ignore[union-attr]
    model(torch.ones(2, 3, device=torch_xla.device())).sum().backward()
    torch_xla.sync()
    if how == "branch" and rank == 1:
        xm.all_reduce("sum", [b.grad])
    elif how == "groups":
        groups = [[0, 2], [1]]
        xm.all_reduce("sum", [(b if rank == 1 else a).grad], groups=groups)
    elif how == "activations":
        xm.all_reduce("sum", [model[rank % 2](torch.ones(3, 3, device=torch_xla.device()))])
    elif how == "order":
        for p in [b, a] if rank == 1 else [a, b]:
            xm.all_reduce("sum", [p.grad])
    else:
        xm.all_reduce("sum", [a.grad])
    return said


@pytest.mark.parametrize("how", ["branch", "order"])
def test_divergence_of_parameters_that_are_reduced_together(ranks: Ranks, how: str) -> None:
    (told,), *others = ranks.values(reduced, 3, how)
    assert others == [[], []]
    first = "in all_reduce sum of float32[3, 3] the ranks reduce different parameters (a warning, "
    assert told.startswith(first)
    assert re.search(r"\n  ranks 0, 2: model.0.weight.grad at line \d+ of .*: xm.all_red", told)
    assert re.search(r"\n  rank 1: model.1.weight.grad at line \d+ of .*: xm.all_reduce", told)


@pytest.mark.parametrize("how", ["aliases", "groups", "activations"])
def test_divergence_of_names_alone_is_none(ranks: Ranks, how: str) -> None:
    assert ranks.values(reduced, 3, how) == [[], [], []]


def metrics(how: str) -> list[str]:
    """Two metrics, averaged one after the other, three times."""
    rank, _ = rehearse()
    from tpunb.backends.rehearsal import errors

    said: list[str] = []
    errors.print_warning = said.append
    loss, hits = (torch.ones((), device=torch_xla.device()) * number for number in (3, 5))

    def average_loss() -> Any:
        return xm.all_reduce("sum", loss)

    def average_hits() -> Any:
        return xm.all_reduce("sum", hits)

    both = [average_loss, average_hits]
    for _ in range(3):
        if how == "swapped" and rank == 2:
            both[1](), both[0]()
        elif how == "lines" and rank == 2:
            xm.all_reduce("sum", loss)
            xm.all_reduce("sum", hits)
        else:
            both[0](), both[1]()
    return said


def test_divergence_of_the_order_of_equal_calls_is_named_once(ranks: Ranks) -> None:
    (told,), *others = ranks.values(metrics, 3, "swapped")
    assert others == [[], []]
    assert told.startswith("two ranks made the same call, all_reduce sum of float32[], twice in a ")
    assert re.search(
        r'\n  rank 0 first at line \d+ of .*: return xm.all_reduce\("sum", loss\)', told
    )
    assert re.search(
        r'\n  rank 2 first at line \d+ of .*: return xm.all_reduce\("sum", hits\)', told
    )


def test_divergence_of_lines_alone_is_none(ranks: Ranks) -> None:
    assert ranks.values(metrics, 3, "lines") == [[], [], []]


def test_divergence_limit_is_independent_for_each_group() -> None:
    from tpunb.backends.xla.rehearsal.divergence import ProgramComparison, ProgramHashes

    first, second = ProgramComparison(), ProgramComparison()
    differ = [ProgramHashes(2, 1), ProgramHashes(6, 1)]
    for number in range(20):  # rank 0 meets others without rank 1
        assert first.differ(RankCall("permute", (str(number),)), [0, 2], differ) == (number < 16)
    for programs in (first, second):
        assert programs.differ(RankCall("all_reduce"), [0, 1], differ)
        assert not programs.differ(RankCall("all_reduce"), [0, 1], differ)


def looked(count: int) -> tuple[int, int]:
    """How often programs were hashed in so many calls, on a rank with little time for it."""
    rehearse()
    from tpunb.backends.xla.rehearsal import divergence

    divergence.SHARE = 1e-9
    for step in range(count):
        xm.all_reduce("sum", [torch.ones(3, device=torch_xla.device()) * step])
    return divergence.programs._hashed, divergence.programs.calls


def test_divergence_hashes_are_taken_less_often_if_expensive(ranks: Ranks) -> None:
    for looks, calls in ranks.values(looked, 2, 100):
        assert calls == 100
        assert 32 < looks < 40


LEAVES = """\
import os, torch, torch_xla
import torch_xla.core.xla_model as xm
rank, device = int(os.environ["RANK"]), torch_xla.device()
weight = torch.ones(3, device=device, requires_grad=True)
for step in range(10):
    rows = 2 if rank == 1 and step >= 7 else 5
    (torch.rand(rows, 3).to(device) * weight).sum().backward()
    xm.reduce_gradients(torch.optim.SGD([weight], lr=0.1))
    torch_xla.sync()
"""


def test_divergence_warns_with_cell_and_line_and_the_run_continues(driver: Driver) -> None:
    seen = driver.run([], LEAVES, ranks=4)
    assert seen.result.state == "succeeded"
    told = [line for line in seen.log if "the ranks run different programs" in line]
    assert len(told) == 1, "\n".join(seen.log)
    log = "\n".join(seen.log)
    assert "[0 err]   ranks 0, 2, 3: at cell [1], line 8: xm.reduce_gradients(" in log
    assert "[0 err]   rank 1: at cell [1], line 8: xm.reduce_gradients(" in log
    assert "reads f32[2,3] where the others read f32[5,3]" in log
    assert "This is collective 8 (after 7 steps); the programs were the same at collective 7" in log
