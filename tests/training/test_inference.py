"""`predict`: the outputs for every sample, in order, from one core and from several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support import examples
from tpunb.training import inference, predict, shard, sharding
from tpunb.training.inference import _Results


@dataclass
class Out:
    logits: torch.Tensor
    more: dict[str, Any]


class Model(nn.Module):
    """A model with outputs of every kind that records how it was called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
        self.body[1].eval()
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> Out:
        assert not torch.is_grad_enabled()
        assert not self.training
        self.calls.append(tuple(x.shape))
        return Out(self.body(x), {"at": (at, at % 2 == 0), "none": None})


def data(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(size, 4, generator=generator), torch.arange(size))


def expected(size: int) -> torch.Tensor:
    model = Model().double().eval()
    with torch.no_grad():
        logits: torch.Tensor = model.body(data(size).tensors[0].double())
    return logits


def check(found: Out, size: int, tolerance: float = 1e-5) -> None:
    assert found.more["none"] is None
    at, even = found.more["at"]
    assert torch.equal(at, torch.arange(size))
    assert torch.equal(even, torch.arange(size) % 2 == 0)
    assert found.logits.dtype == torch.float32
    assert found.logits.device.type == "cpu"
    torch.testing.assert_close(
        found.logits.double(), expected(size), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("size", [1, 7, 8, 100])
def test_predict_in_the_kernel_equals_the_model_on_each_batch(size: int) -> None:
    model = Model()
    found = predict(model, data(size), 8)
    check(found, size)
    assert model.training
    assert not model.body[1].training  # as it was
    assert set(model.calls) == {(8, 4)}


def test_bf16_computes_in_bfloat16_and_returns_float32() -> None:
    model = Model()
    check(predict(model, data(50), 8, bf16=True), 50, tolerance=0.03)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1000), st.integers(1, 64), st.integers(1, 8), st.booleans(), st.booleans())
def test_rows_of_all_ranks_come_into_the_order_of_the_data(
    size: int, batch_size: int, world: int, grouped: bool, streamed: bool
) -> None:
    """The part of rank 0, with all ranks' outputs as the collective would return them."""
    groups = [at % 3 for at in range(size)] if grouped and not streamed else None
    source: Any = Numbers(size) if streamed else torch.arange(size)
    batches = shard(source, batch_size, groups=groups)
    with pytest.MonkeyPatch.context() as patch:
        steps = []
        for rank in range(world):
            patch.setattr(sharding, "rank_and_world", lambda rank=rank: (rank, world))
            steps.append(list(batches.steps()))
    results = _Results(None if streamed else size, batch_size, world, widen=False)
    for of_ranks in zip(*steps, strict=True):
        results.add(torch.cat([step.batch for step in of_ranks]), of_ranks[0])
    found = results.finish()
    if size == 0:
        assert found is None
    else:
        assert torch.equal(found, torch.arange(size))


class Numbers(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def test_a_loader_keeps_its_collate_and_dicts_are_keywords() -> None:
    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(samples), "plus": torch.ones(len(samples))}

    loader: Any = DataLoader(range(11), 4, collate_fn=collate)  # type: ignore[arg-type]
    found = predict(lambda x, plus: x + plus, loader)
    assert found.tolist() == [at + 1.0 for at in range(11)]


def test_a_function_of_torch_is_a_model_too() -> None:
    assert torch.equal(predict(torch.sigmoid, torch.arange(9.0), 4), torch.arange(9.0).sigmoid())


def test_predict_step_option_selects_inputs_and_outputs() -> None:
    model = nn.Linear(4, 3).eval()
    found = predict(model, data(10), 4, step=lambda batch: model(batch[0]).argmax(1))
    assert torch.equal(found, model(data(10).tensors[0]).argmax(1))


def test_a_bfloat16_model_returns_bfloat16() -> None:
    model = nn.Linear(4, 3).bfloat16()
    found = predict(model, data(9).tensors[0].bfloat16(), 4)
    assert found.dtype == torch.bfloat16
    assert found.shape == (9, 3)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (data(8), "too many positional arguments"),
        ([{"x": torch.zeros(4)}] * 8, "missing a required argument: 'input'"),
    ],
)
def test_a_batch_that_the_model_cannot_take_raises(samples: Any, said: str) -> None:
    with pytest.raises(TypeError, match=rf"predict: .*{said}.* step=lambda batch: model"):
        predict(nn.Linear(4, 3), samples, 4)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda batch: batch[0].mean(), r"shape \[\] for a batch of 4 samples"),
        (lambda batch: batch[0][:2], r"shape \[2, 4\] for a batch of 4"),
        (lambda batch: {"x": batch[0], "kind": "cat"}, "holds a str"),
        (lambda batch: batch[0][:, : int(batch[1][0]) + 1], r"\[\(4, 4\)\].* \[\(4, 1\)\]"),
    ],
)
def test_outputs_without_a_row_per_sample_raise(step: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"predict: .*{said}"):
        predict(nn.Identity(), data(8), 4, step=step)


def test_the_mode_is_restored_after_an_exception() -> None:
    model = Model()
    with pytest.raises(TypeError):
        predict(model, data(8).tensors[0], 4)
    assert model.training
    assert torch.is_grad_enabled()


def test_progress_is_reported_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TPUNB_RUN": str(tmp_path), "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(inference, "rank_and_world", lambda: (0, 1))
    told = tmp_path / "attempts/0/0/progress.json"
    told.parent.mkdir(parents=True)
    seen = []

    def step(batch: list[torch.Tensor]) -> torch.Tensor:
        seen.append(json.loads(told.read_text()))
        return batch[0]

    predict(nn.Identity(), data(10), 4, step=step)
    # Written at once, then a few times a second.
    assert seen[0]["bars"] == [{"name": "predict", "done": 0, "total": 3}]
    assert json.loads(told.read_text())["bars"] == [{"name": "predict", "done": 3, "total": 3}]


def test_data_in_random_order_is_refused() -> None:
    for shuffled in (DataLoader(data(8), 4, shuffle=True), shard(data(8), 4, shuffle=True)):
        with pytest.raises(ValueError, match="could not be matched to them"):
            predict(nn.Identity(), shuffled)
    with pytest.raises(ValueError, match=r"remainder='drop'.* each sample once"):
        predict(nn.Identity(), shard(data(8), 4, remainder="drop"))


def test_a_model_that_was_not_moved_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "rank_and_world", lambda: (1, 4))
    with pytest.raises(ValueError, match=r"on cpu in rank 1 of 4: .*torch_xla\.device\(\)"):
        predict(nn.Linear(4, 3), data(8), 4)
