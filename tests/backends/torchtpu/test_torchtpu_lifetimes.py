"""A run keeps nothing of the user's alive for longer than Python alone does, on a rehearsed TPU."""

from __future__ import annotations

import pytest

from tests.drivers import lifetimes


@pytest.fixture(scope="module")
def seen(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> lifetimes.Seen:
    return lifetimes.seen("torchtpu", tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("case", lifetimes.CASES)
def test_nothing_lives_longer_in_a_run(seen: lifetimes.Seen, case: str) -> None:
    assert seen["run"][case] == []


@pytest.mark.parametrize("case", [*lifetimes.CASES, "after the cell"])
def test_nothing_lives_longer_under_debug(seen: lifetimes.Seen, case: str) -> None:
    assert seen["debug"][case] == []
