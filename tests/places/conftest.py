"""Hosts that are network namespaces, reached by stand-ins for ssh and gcloud."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.drivers.pods import ReachedPod, reached_pod
from tests.fakes.hosts import why_refused


@pytest.fixture(scope="module")
def _pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReachedPod]:
    if refused := why_refused():
        pytest.skip(refused)
    with reached_pod(2, tmp_path_factory.mktemp("pod")) as pod:
        yield pod


@pytest.fixture
def pod(_pod: ReachedPod, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReachedPod]:
    """Two hosts, h0 and h1, and a project that names them as place `pod`."""
    for name, value in _pod.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(_pod.folder))
    monkeypatch.chdir(_pod.project)
    yield _pod
    _pod.set_place()
    for host in _pod.names:
        _pod.change(host, refuses=None, env=None, path=None)
    _pod.wait_until_empty()
