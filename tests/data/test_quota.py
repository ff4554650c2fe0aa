"""What is left of a week's TPU hours, from a service that speaks Kaggle's protocol."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.kernels import PATIENCE
from tests.platforms.machines import machine
from tpunb.data import quota
from tpunb.data.fake_kaggle import FakeKaggle
from tpunb.data.quota import Asking
from tpunb.display import setup
from tpunb.platforms import report
from tpunb.price import Quota

ANSWER = {
    "quotaRefreshTime": "2026-11-28T00:00:00Z",
    "gpuQuota": {"timeUsed": "0s", "totalTimeAllowed": "108000s"},
    "tpuQuota": {"timeUsed": "19800.500s", "totalTimeAllowed": "72000s"},
}


@pytest.fixture
def there(kaggle: FakeKaggle, monkeypatch: pytest.MonkeyPatch) -> FakeKaggle:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr(quota, "PATIENCE", PATIENCE)  # this machine may be busy
    kaggle.quota = ANSWER
    return kaggle


def test_kaggle_says_what_is_left(there: FakeKaggle, tmp_path: Path) -> None:
    found = Asking(os.environ).answer()
    assert found == Quota(19800.5, 72000.0, "2026-11-28")
    assert str(found) == "14.5 of 20 TPU hours of this week, until 2026-11-28"
    with machine("kaggle-tpu", tmp_path / "machine") as made:
        env = {**os.environ, **made.env}
        shown = report.look(
            env, runs=tmp_path, root=made.root, quota=Asking(dict(os.environ)).answer
        )
    assert "quota left   14.5 of 20 TPU hours" in setup.text(shown)
    assert shown.to_json()["quota"]["used"] == 19800.5


def test_without_the_answer_nothing_is_known(
    there: FakeKaggle, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.quota = {}
    assert Asking(os.environ).answer() is None
    there.quota = ANSWER
    monkeypatch.setenv("KAGGLE_KEY", "another")
    assert Asking(os.environ).answer() is None
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Asking(os.environ).answer() is None


def test_nobody_is_asked_outside_of_kaggle_or_without_a_login(
    there: FakeKaggle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAGGLE_KEY")
    assert Asking(os.environ).answer() is None
    monkeypatch.setenv("KAGGLE_KEY", there.key)
    monkeypatch.delenv("KAGGLE_KERNEL_RUN_TYPE")
    assert Asking(os.environ).answer() is None
    assert there.asked == []


def test_a_file_that_others_can_read_is_not_used(there: FakeKaggle) -> None:
    path = Path.home() / ".kaggle" / "access_token"
    path.parent.mkdir()
    path.write_text("a-token")
    path.chmod(0o644)
    assert Asking(os.environ).answer() is None
    assert there.asked == []


def test_durations_are_those_of_protocol_buffers() -> None:
    assert quota.read({"tpuQuota": {"totalTimeAllowed": "72000s"}}).left == 72000.0
    with pytest.raises(KeyError):
        quota.read({})
