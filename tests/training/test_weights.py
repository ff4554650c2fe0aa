"""`save_weights`: files that others read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from tests.worker.ranks import Ranks, rehearse, warm
from tpunb.errors import CheckpointError
from tpunb.training import save_weights


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with warm(tmp_path_factory.mktemp("ranks")) as started:
        yield started


class Tied(nn.Module):
    """Its output's weights are those of its input, as in most language models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight
        self.norm = nn.BatchNorm1d(4)


def filled() -> Tied:
    model = Tied()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def test_weights_come_back(tmp_path: Path) -> None:
    model = Tied()
    save_weights(model, tmp_path / "new" / "model.safetensors", data="words")
    again = filled()
    assert load_model(again, tmp_path / "new" / "model.safetensors") == (set(), [])
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "data": "words", "out.weight": "words.weight"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]


def test_views_parts_and_types(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"rows": whole[:2], "turned": whole.T, "number": torch.tensor(3), "empty": whole[:0]}
    save_weights(state, tmp_path / "a.safetensors", dtype=torch.bfloat16)
    read = load_file(tmp_path / "a.safetensors")
    for name, value in state.items():
        assert torch.equal(read[name], value.to(read[name].dtype))
    kinds = {name: value.dtype for name, value in read.items()}
    assert kinds.pop("number") == torch.int64
    assert set(kinds.values()) == {torch.bfloat16}


def written(folder: str) -> Any:
    rank, _ = rehearse()
    import torch_xla

    model = Tied().to(torch_xla.device())
    model.out.weight = model.words.weight
    save_weights(model, f"{folder}/rank.safetensors" if rank else f"{folder}/first.safetensors")
    return model.words.weight.cpu()


ELSEWHERE = """
import sys
sys.modules["torch_xla"] = None
from safetensors.torch import load_file
weights = load_file(sys.argv[1])
assert not any(name.startswith("tpunb") for name in sys.modules)
print(sorted(weights), {str(weight.device) for weight in weights.values()})
"""


@pytest.mark.slow
def test_rank_0_writes_what_a_machine_without_torch_xla_reads(ranks: Ranks, tmp_path: Path) -> None:
    weight, _ = ranks.values(written, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["first.safetensors"]
    assert torch.equal(load_file(tmp_path / "first.safetensors")["words.weight"], weight)
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, tmp_path / "first.safetensors"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['norm.bias', ")
    assert "'out.weight'" not in done.stdout  # tied: it is there once
    assert done.stdout.endswith("{'cpu'}\n")


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step: a \.safetensors file holds tensors only"):
        save_weights({"step": 3}, tmp_path / "a.safetensors")  # type: ignore[dict-item]
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*a\.safetensors \(0\.0 MB\)"):
        save_weights({"x": torch.ones(2)}, tmp_path / "file" / "a.safetensors")
    model = {"x": torch.ones(100)}
    save_weights(model, tmp_path / "a.safetensors")
    before = (tmp_path / "a.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="cannot write"):
        save_weights(model, "/dev/full/a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == before
