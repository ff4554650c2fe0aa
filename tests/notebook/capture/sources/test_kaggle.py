"""Kaggle: an interactive session with its service, and a batch run by papermill."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.kernel import PATIENCE
from tests.fakes.front_ends import kaggle as fake_kaggle
from tests.fakes.front_ends.kaggle import Service
from tests.notebook.capture.fronts import (
    LOAD,
    TRAIN,
    code,
    kernel,
    program,
    sources,
    started,
    write,
    written,
)
from tpunb.notebook.capture.sources import kaggle
from tpunb.notebook.capture.sources.base import LocatedNotebook, UnavailableError
from tpunb.notebook.capture.sources.kaggle import from_kaggle

ADDED = """# IMPORTANT: RUN THIS CELL IN ORDER TO IMPORT YOUR KAGGLE DATA SOURCES,
# THEN FEEL FREE TO DELETE THIS CELL.
import kagglehub"""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for name, module in fake_kaggle.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    with Service() as service:
        for name, value in service.environ.items():
            monkeypatch.setenv(name, value)
        yield service


def draft(tmp_path: Path, *cells: str) -> str:
    return write(tmp_path / "draft.ipynb", *map(code, cells)).read_text(encoding="utf-8")


@pytest.mark.usefixtures("starts_processes")
def test_the_draft_of_an_interactive_session(service: Service, tmp_path: Path) -> None:
    service.source = draft(tmp_path, ADDED, LOAD, "rate = 2", "never = 1", TRAIN)
    with started(tmp_path, fake_kaggle.__name__, **service.environ) as client:
        # As far as is known its editor sends no ids.
        for source in (LOAD, "rate = 1", "rate = 2", TRAIN):
            client.execute(source, reply=True, timeout=PATIENCE)
    found = written(tmp_path)
    assert sources(found) == [LOAD, "rate = 2", TRAIN]
    assert (found["origin"], found["path"]) == ("Kaggle's editor", None)
    assert found["notes"] == ["never ran in this kernel, so left out: cell [ ] (never = 1)"]
    assert ["rate = 2"] in [cell["source"] for cell in found["content"]["cells"]]


def test_a_service_that_does_not_give_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = kernel(**service.environ)

    def refused(words: str) -> None:
        with pytest.raises(UnavailableError, match=words):
            from_kaggle(session)

    refused("Unexpected response from the service")
    service.source = "not json"
    refused("Kaggle sent no notebook: ")
    service.source = '{"cells": 3}'
    refused("Kaggle sent no notebook: cells are not a list")
    service.source = draft(tmp_path, "a = 1")
    assert from_kaggle(session) is not None
    monkeypatch.setattr(kaggle, "WAIT", 0.2)
    service.delay.clear()
    refused(r"Kaggle did not send the notebook within 0\.2 s")
    service.delay.set()
    monkeypatch.setattr(kaggle, "WAIT", PATIENCE)
    service.token = "another"
    refused("Kaggle did not send the notebook: Service responded with error code 401$")
    monkeypatch.setenv("KAGGLE_URL_BASE", "http://127.0.0.1:9")
    refused("Connection error")
    monkeypatch.delenv("KAGGLE_USER_SECRETS_TOKEN")
    refused("JWT Token is required")


@pytest.mark.usefixtures("starts_processes")
def test_what_is_asked_in_which_kind_of_run(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.source = draft(folder, "a = 1")
    monkeypatch.setattr(kaggle, "WORKING", folder)
    file = write(folder / "__notebook__.ipynb", "a = 1")

    def origin(**environ: str) -> str | None:
        found = from_kaggle(kernel(**environ))
        return found and found.origin

    batch = LocatedNotebook("Kaggle's batch run", file, title="notebook")
    assert from_kaggle(kernel(KAGGLE_KERNEL_RUN_TYPE="Batch")) == batch
    assert origin(KAGGLE_KERNEL_RUN_TYPE="Interactive") == "Kaggle's editor"
    assert origin() is None
    # A notebook that something runs inside of one that is open on Kaggle is another.
    with program(folder, "papermill", "in.ipynb", "o.ipynb", JPY_PARENT_PID="1") as pid:
        assert origin(KAGGLE_KERNEL_RUN_TYPE="Interactive", JPY_PARENT_PID=pid) is None
    file.unlink()
    assert origin(KAGGLE_KERNEL_RUN_TYPE="Batch") is None
    assert origin(KAGGLE_KERNEL_RUN_TYPE="something new") == "Kaggle's editor"
    for name in fake_kaggle.modules():
        monkeypatch.delitem(sys.modules, name)
    assert origin(KAGGLE_KERNEL_RUN_TYPE="Interactive") is None  # not Kaggle's image


def test_the_service_refuses_what_kaggle_would(service: Service) -> None:
    request = urllib.request.Request(
        service.environ["KAGGLE_URL_BASE"] + "/other",
        json.dumps({}).encode(),
        {"X-Kaggle-Authorization": f"Bearer {service.token}"},
    )
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(request, timeout=60)
    caught.value.close()
