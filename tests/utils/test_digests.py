"""Digests of large values."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from tpunb.utils.digests import differ, digest


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


def trained(made: nn.Module) -> nn.Module:
    with torch.no_grad():
        list(made.parameters())[-1].add_(1)
    return made


def table() -> pd.DataFrame:
    return pd.DataFrame({"n": range(100), "x": np.linspace(0, 1, 100), "t": ["a", "b"] * 50})


BIG = np.random.default_rng(0).normal(size=(300, 400)).astype("float32")
PAIRS: dict[str, tuple[Any, Any]] = {
    "values": (BIG, BIG * 1.5),
    "shape": (BIG, BIG[:-1]),
    "dtype": (BIG, BIG.astype("float64")),
    "transposed": (BIG[:300, :300], BIG[:300, :300].T),
    "the last item": (np.arange(10_000), np.append(np.arange(9_999), -1)),
    "tensors": (torch.from_numpy(BIG), torch.from_numpy(BIG) + 1),
    "bfloat16": (torch.from_numpy(BIG).bfloat16(), torch.from_numpy(BIG).bfloat16() * 2),
    "booleans": (torch.zeros(5, dtype=torch.bool), torch.ones(5, dtype=torch.bool)),
    "complex": (torch.zeros(5, dtype=torch.complex64), torch.full((5,), 1j)),
    "nan": (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
    "texts": (np.array(["a", "b"]), np.array(["a", "c"])),
    "parameters": (nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))),
    "modules": (model(), trained(model())),
    "tables": (table(), table().assign(n=1)),
    "columns": (table(), table().rename(columns={"t": "u"})),
    "texts of tables": (table(), table().assign(t="c")),
    "series": (table().x, table().x + 1),
    "long lists": (list(range(5000)), list(range(5001))),
    "long texts": ("ab" * 20_000, "ab" * 19_999 + "cc"),
    "lists of tensors": ([torch.zeros(2), 1], [torch.ones(2), 1]),
    "dicts of tensors": ({"a": torch.zeros(2)}, {"a": torch.ones(2)}),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs(name: str) -> None:
    one, other = map(digest, PAIRS[name])
    assert one is not None
    assert other is not None
    assert differ(one, other)
    written = json.loads(json.dumps(one))
    assert not differ(one, written)
    assert not differ(written, digest(PAIRS[name][0]) or {})


def test_last_digits_that_differ_by_the_number_of_threads_are_no_difference() -> None:
    one, other = digest(BIG), digest(BIG * (1 + 1e-6))
    assert one is not None
    assert other is not None
    assert not differ(one, other)


def test_a_tensor_is_sampled_as_it_lies_and_not_copied() -> None:
    turned = torch.arange(12_000_000).reshape(3000, 4000).T
    found = digest(turned)
    assert found == digest(turned.contiguous())
    assert len(json.dumps(found)) < 20_000


def test_what_has_none() -> None:
    class Own:
        pass

    for value in (Own(), print, Own, 1, object(), np.dtype("f4")):
        assert digest(value) is None
    for tensor in (torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()):
        assert digest(tensor) == {"type": "tensor", "shape": [3], "dtype": "torch.float32"}
