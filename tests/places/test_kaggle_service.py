"""Kaggle's own client against a stand-in of the service: logins, answers, time-outs."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kaggle import KEY, KaggleProject
from tests.fakes.kaggle_server import SECRET
from tpunb.places import kaggle_service
from tpunb.places.errors import PlaceError
from tpunb.places.kaggle_service import (
    NoAnswerError,
    OutputFile,
    Pushed,
    Quota,
    SessionStatus,
    bounded,
    connect,
    download,
)
from tpunb.places.place import Cancelled
from tpunb.utils.errors import MissingPackageError

REF = "somebody/tpunb-a-run"


def script(text: str, **fields: Any) -> dict[str, Any]:
    """Fields of a script to push, which runs faster than a notebook."""
    made = {"slug": REF, "new_title": "tpunb a run", "text": text, "language": "python"}
    return {**made, "kernel_type": "script", **fields}


def wait_until_over(kaggle: KaggleProject) -> None:
    for session in kaggle.service.sessions.values():
        for thread in session.threads:
            thread.join()


def test_push_status_log_and_outputs(kaggle: KaggleProject, tmp_path: Path) -> None:
    service = connect()
    assert (service.username, service.secrets()) == ("somebody", [KEY])
    assert service.quota() == Quota(1.0, 20.0, "2026-11-28 00:00 UTC")
    assert service.status(REF) is None
    kaggle.service.hold.clear()
    text = "import os; print('hello', flush=True); os.mkdir('d'); open('d/a', 'w').write('x' * 9)"
    pushed = service.push(script(text, dataset_data_sources=["me/cats"]))
    assert pushed == Pushed(REF, ("me/cats",))
    assert service.status(REF) == SessionStatus("QUEUED")
    kaggle.service.hold.set()
    wait_until_over(kaggle)
    assert service.status(REF) == SessionStatus("COMPLETE")
    assert "".join(service.log(REF)) == "hello\n"
    [file] = service.outputs(REF)
    assert file.name == "d/a"
    download(file, tmp_path / "a")
    assert (tmp_path / "a").read_text() == "x" * 9
    assert not kaggle.service.leaked


def test_outputs_of_many_pages(kaggle: KaggleProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kaggle_service, "PAGE", 3)
    service = connect()
    service.push(script("for n in range(7): open(str(n), 'w').close()"))
    wait_until_over(kaggle)
    assert [file.name for file in service.outputs(REF)] == list("0123456")


@pytest.mark.parametrize(
    ("most", "used", "fields", "words"),
    [
        (0, 0, {}, "Maximum batch TPU session count of 0 reached"),
        (1, 72000, {"machine_shape": "TpuV5E8"}, "Accelerator Quota Exceeded"),
        (1, 0, {"slug": "another/name"}, "Permission 'kernels.update' was denied"),
        (1, 0, {"new_title": "a"}, "Title must be at least five characters"),
    ],
)
def test_push_refused_in_a_successful_answer(
    kaggle: KaggleProject, most: int, used: int, fields: dict[str, Any], words: str
) -> None:
    kaggle.service.most_sessions, kaggle.service.used = most, used
    with pytest.raises(PlaceError, match=f"Kaggle did not start the run: {words}"):
        connect().push(script("", **fields))
    assert not kaggle.service.sessions


def test_kaggle_errors_are_retried_or_raised(
    kaggle: KaggleProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = connect()
    kaggle.service.trouble["GetAcceleratorQuotaStatistics"] = [500, 429, 0]
    assert service.quota() is not None
    kaggle.service.trouble["GetAcceleratorQuotaStatistics"] = [503] * 4
    with pytest.raises(NoAnswerError, match="HTTP 503"):
        service.quota()
    # A push that Kaggle may have accepted is not repeated.
    kaggle.service.trouble["SaveKernel"] = [502]
    with pytest.raises(NoAnswerError, match="HTTP 502"):
        service.push(script(""))
    assert not kaggle.service.sessions
    kaggle.service.trouble["logs"] = [500]
    with pytest.raises(NoAnswerError, match="HTTP 500"):
        list(service.log(REF))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens
    with pytest.raises(NoAnswerError, match=r"Kaggle cannot be reached \(ProxyError\)"):
        service.status(REF)


def test_cancellation_ends_the_pause_before_a_retry(
    kaggle: KaggleProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fail(*given: object, **options: object) -> None:
        asked.append(given)
        raise NoAnswerError("Kaggle has not answered")

    service = connect(lambda: bool(asked))
    monkeypatch.setattr(kaggle_service, "AGAIN", (60.0,))
    monkeypatch.setattr(kaggle_service, "bounded", fail)
    with pytest.raises(Cancelled):
        service.quota()
    assert len(asked) == 1


def test_download_that_fails_or_is_cut(kaggle: KaggleProject, tmp_path: Path) -> None:
    kaggle.service.files["outputs/a"] = stored = type(
        "", (), {"content": b"x" * 1000, "cut": [10, 20], "reads": [], "md5": "", "tag": '"a"'}
    )()
    file = OutputFile("a", f"http://store.test/outputs/a?{SECRET}")
    download(file, tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == b"x" * 1000
    stored.cut = [10] * 4
    with pytest.raises(NoAnswerError, match="a could not be downloaded") as caught:
        download(file, tmp_path / "b")
    assert SECRET not in str(caught.value)
    assert [path.name for path in tmp_path.glob("*[ab]*") if path.is_file()] == ["a"]
    with pytest.raises(PlaceError, match=r"^c could not be downloaded: HTTP 404$"):
        download(OutputFile("c", f"http://store.test/outputs/c?{SECRET}"), tmp_path / "b")


def test_kaggle_logins_by_key_file_and_token(
    kaggle: KaggleProject, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("KAGGLE_KEY", "an-older-key")
    with pytest.raises(PlaceError, match=r"refuses your login: `kaggle auth login`"):
        connect().quota()
    monkeypatch.delenv("KAGGLE_KEY")
    monkeypatch.delenv("KAGGLE_USERNAME")
    with pytest.raises(PlaceError, match=r"not logged in to Kaggle .* `kaggle auth login`"):
        connect()
    (kaggle.home / "kaggle.json").write_text(json.dumps({"username": "somebody", "key": KEY}))
    (kaggle.home / "kaggle.json").chmod(0o600)
    assert connect().quota() is not None
    kaggle.service.token = "a-new-token"
    monkeypatch.setenv("KAGGLE_API_TOKEN", "a-new-token")
    assert connect().secrets() == [KEY, "a-new-token"]
    assert capsys.readouterr() == ("", "")


def test_missing_kaggle_client_is_explained(
    kaggle: KaggleProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kaggle.api.kaggle_api_extended", None)
    with pytest.raises(MissingPackageError, match=r"kaggle .* `pip install 'tpunb\[kaggle\]'`"):
        connect()


def test_calls_without_an_answer_time_out() -> None:
    never = threading.Event()
    with pytest.raises(NoAnswerError, match=r"Kaggle has not answered in 0.05 s"):
        bounded(never.wait, 0.05)
    never.set()
