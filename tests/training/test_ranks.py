"""The rank of this process."""

from __future__ import annotations

import pytest

from tpunb.training.ranks import is_first, rank_and_world


def test_outside_of_a_run_there_is_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert rank_and_world() == (0, 1)
    assert is_first()
