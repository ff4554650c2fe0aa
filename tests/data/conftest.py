from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tpunb.data import fetch
from tpunb.data.fake_kaggle import FakeKaggle

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's credentials, no proxy but a test's own, and no waiting."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in (*PROXIES, *map(str.upper, PROXIES), "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("USERNAME", "KEY", "API_TOKEN", "CONFIG_DIR", "KERNEL_RUN_TYPE", "API_V1_TOKEN"):
        monkeypatch.delenv(f"KAGGLE_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fetch, "PAUSE", 0.001)


@pytest.fixture
def kaggle(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKaggle]:
    """Kaggle's stand-in, and somebody's key in the environment."""
    with FakeKaggle(key="s3cr3t-key") as service:
        for name, value in service.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("KAGGLE_USERNAME", service.username)
        monkeypatch.setenv("KAGGLE_KEY", service.key)
        yield service
