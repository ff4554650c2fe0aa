from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kaggle_server import FakeKaggle

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def _at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, no proxies except those that a test sets, and no waiting."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in (*PROXIES, *map(str.upper, PROXIES), "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in os.environ:
        if name.startswith("KAGGLE"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(home / "cache"))
    # At its import kagglehub reads both: the home folder and standard output of an earlier test.
    monkeypatch.setenv("KAGGLE_CONFIG_DIR", str(home / ".kaggle"))
    monkeypatch.setenv("KAGGLEHUB_VERBOSITY", "error")
    # kagglehub searches it for each request: seconds, where this many modules are loaded.
    monkeypatch.setattr("inspect.stack", lambda *_: [])
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kaggle(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKaggle]:
    """A fake Kaggle service, and a user's key for it in the environment."""
    with FakeKaggle(key="s3cr3t-key") as service:
        for name, value in service.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("KAGGLE_USERNAME", service.username)
        monkeypatch.setenv("KAGGLE_KEY", service.key)
        yield service
    with warnings.catch_warnings():  # kagglehub leaves connections open when it resumes or fails
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
