"""More of tests/places/test_kaggle.py, which takes longer."""

from __future__ import annotations

import pytest

from tests.drivers.kaggle import KaggleProject
from tests.places.conftest import kaggle
from tests.places.test_kaggle import REF, _quick, opened, run, started
from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled
from tpunb.runs.directory import RunDir


def test_push_cancelled_or_over_the_session_limit(kaggle: KaggleProject, run: RunDir) -> None:
    with pytest.raises(Cancelled):
        opened(run).start({}, lambda text: None, lambda: True)
    kaggle.service.most_sessions = 0
    with pytest.raises(PlaceError, match="session count of 0 reached"):
        started(opened(run))


def test_push_whose_answer_is_lost_is_looked_up(kaggle: KaggleProject, run: RunDir) -> None:
    kaggle.service.trouble["SaveKernel"] = [500]
    with pytest.raises(PlaceError, match="HTTP 500: the run has not started"):
        started(opened(run))
    kaggle.service.hold.clear()
    kaggle.service.lose_answer = True
    started(opened(run))
    assert list(kaggle.service.sessions) == [REF]
