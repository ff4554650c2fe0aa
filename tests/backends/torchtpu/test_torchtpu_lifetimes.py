"""A run keeps nothing of the user's alive for longer than Python alone does, on a rehearsed TPU."""

from __future__ import annotations

import pytest

from tests.drivers import lifetimes
from tests.scenarios.test_lifetimes import (  # noqa: F401 - with this module's fixture
    test_nothing_lives_longer_in_a_run,
    test_nothing_lives_longer_under_debug,
)


@pytest.fixture(scope="module")
def seen(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> lifetimes.Seen:
    return lifetimes.seen("torchtpu", tmp_path_factory.mktemp("lab"))
