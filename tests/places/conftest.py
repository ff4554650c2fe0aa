"""Fixtures: hosts in network namespaces, with stand-ins for ssh and gcloud; Kaggle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kaggle import KaggleProject, kaggle_project
from tests.drivers.pods import ReachedPod, reached_pod
from tests.fakes.hosts import why_refused
from tpunb.places import kaggle as kaggle_module


@pytest.fixture(scope="module")
def _pod(starts_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReachedPod]:
    if refused := why_refused():
        pytest.skip(refused)
    with reached_pod(2, tmp_path_factory.mktemp("pod")) as pod:
        yield pod


@pytest.fixture
def pod(_pod: ReachedPod, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReachedPod]:
    """Two hosts, h0 and h1, and a project with the place `pod` of both."""
    for name, value in _pod.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(_pod.folder))
    monkeypatch.chdir(_pod.project)
    yield _pod
    _pod.set_place()
    for host in _pod.names:
        _pod.change(host, refuses=None, slow=None, env=None, path=None)
    _pod.wait_until_empty()


@pytest.fixture
def kaggle(
    starts_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KaggleProject]:
    """Kaggle's stand-in for its client in this process, and a project with a place on it."""
    with kaggle_project(tmp_path) as project:
        for name in project.removed():
            monkeypatch.delenv(name, raising=False)
        for name, value in project.login().items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(project.folder)
        from kaggle.api.kaggle_api_extended import KaggleApi

        # The client reads these at its import, which may have happened in another test.
        monkeypatch.setattr(KaggleApi, "args", ["--local"])
        monkeypatch.setattr(KaggleApi, "config", str(project.home / "kaggle.json"))
        monkeypatch.setattr(KaggleApi, "config_values", {})
        monkeypatch.setattr(kaggle_module, "POLL_INTERVAL", 0.05)
        yield project
