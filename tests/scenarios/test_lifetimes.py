"""A run keeps nothing of the user's alive for longer than Python alone does."""

from __future__ import annotations

import pytest

from tests.drivers import lifetimes

pytestmark = pytest.mark.usefixtures("lent")


@pytest.fixture(scope="module", params=["xla", "torch"])
def seen(
    request: pytest.FixtureRequest, lent: None, tmp_path_factory: pytest.TempPathFactory
) -> lifetimes.Seen:
    return lifetimes.seen(request.param, tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("case", lifetimes.CASES)
def test_nothing_lives_longer_in_a_run(seen: lifetimes.Seen, case: str) -> None:
    assert seen["run"][case] == []


@pytest.mark.parametrize("case", [*lifetimes.CASES, "after the cell"])
def test_nothing_lives_longer_under_debug(seen: lifetimes.Seen, case: str) -> None:
    assert seen["debug"][case] == []
