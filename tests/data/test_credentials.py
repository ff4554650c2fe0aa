from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pytest

from tpunb.data import credentials
from tpunb.errors import DataError, SetupError

KEY = "0123456789abcdef"
GIVEN = json.dumps({"username": "somebody", "key": KEY})


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path / "home")}


def put(path: Path, text: str, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_what_is_taken_first(env: dict[str, str], tmp_path: Path) -> None:
    home = Path(env["HOME"])
    assert credentials.find(env) is None
    login = put(home / ".kaggle/credentials.json", '{"refresh_token": "x"}')
    assert credentials.find(env) == credentials.Credentials(str(login), login=login)
    other = put(home / ".config/kaggle/kaggle.json", GIVEN)
    login.unlink()
    login.parent.rmdir()
    assert credentials.find(env) == credentials.Credentials(str(other), "somebody", KEY)
    mine = put(home / ".kaggle/kaggle.json", GIVEN)
    assert credentials.find(env) == credentials.Credentials(str(mine), "somebody", KEY)
    env["KAGGLE_USERNAME"] = "me"
    found = credentials.find(env)
    assert found == credentials.Credentials(f"KAGGLE_USERNAME and {mine}", "me", KEY)
    env["KAGGLE_CONFIG_DIR"] = str(tmp_path / "elsewhere")
    assert credentials.find(env) is None
    env["KAGGLE_KEY"] = "k"
    assert credentials.find(env) == credentials.Credentials(
        "KAGGLE_USERNAME and KAGGLE_KEY", "me", "k"
    )
    token = put(home / ".kaggle/access_token.txt", "t1\n")
    assert credentials.find(env) == credentials.Credentials(str(token), token="t1")
    env["KAGGLE_API_TOKEN"] = "t2"
    assert credentials.find(env) == credentials.Credentials("KAGGLE_API_TOKEN", token="t2")
    env["KAGGLE_API_TOKEN"] = str(put(tmp_path / "token", "t3"))
    assert credentials.find(env) == credentials.Credentials(
        f"{tmp_path}/token, named by KAGGLE_API_TOKEN", token="t3"
    )
    env["KAGGLE_API_V1_TOKEN"] = str(put(tmp_path / "platform", "t4", 0o644))
    env["KAGGLE_KERNEL_RUN_TYPE"] = "Batch"
    found = credentials.find(env)
    assert found == credentials.Credentials("the Kaggle notebook's own token", token="t4")
    assert "t4" not in repr(found)


@pytest.mark.parametrize("name", ["kaggle.json", "access_token", "credentials.json"])
def test_a_file_that_others_may_read_is_refused(env: dict[str, str], name: str) -> None:
    path = put(Path(env["HOME"]) / ".kaggle" / name, GIVEN, 0o640)
    with pytest.raises(SetupError, match=rf"\(mode 640\): `chmod 600 {path}`") as caught:
        credentials.find(env)
    assert KEY not in str(caught.value)


def test_a_broken_file_is_named_and_not_shown(env: dict[str, str]) -> None:
    path = put(Path(env["HOME"]) / ".kaggle/kaggle.json", f'{{"key": "{KEY}"')
    with pytest.raises(SetupError, match=f"{path} is not the kaggle.json") as caught:
        credentials.find(env)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.fixture
def website() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(GIVEN.encode())

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_one_is_put_in_place_from_anywhere(
    env: dict[str, str], tmp_path: Path, website: str
) -> None:
    given = put(tmp_path / "download/kaggle.json", GIVEN, 0o644)
    with fsspec.open("memory://secrets/kaggle.json", "w") as file:
        file.write(GIVEN)
    path = Path(env["HOME"]) / ".kaggle/kaggle.json"
    for source in (str(given), "memory://secrets/kaggle.json", f"{website}/kaggle.json?sig=5ec2e7"):
        said = credentials.install(source, env)
        assert f"is in place as {path}, with mode 600" in said
        assert "5ec2e7" not in said
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o077 == 0
        assert ("others may" in said or f"chmod 600 {given}" in said) == (source == str(given))
        assert credentials.find(env) == credentials.Credentials(str(path), "somebody", KEY)
        path.unlink()


def test_another_one_is_not_overwritten(env: dict[str, str], tmp_path: Path) -> None:
    given = put(tmp_path / "kaggle.json", GIVEN)
    mine = put(Path(env["HOME"]) / ".kaggle/kaggle.json", GIVEN.replace("some", "any"))
    before = mine.read_text()
    with pytest.raises(SetupError, match="there already, with other content: move it away"):
        credentials.install(str(given), env)
    assert mine.read_text() == before
    mine.write_text(GIVEN)
    mine.chmod(0o644)
    assert "has the same content already; its mode is 600" in credentials.install(str(given), env)
    assert mine.stat().st_mode & 0o777 == 0o600


def test_what_is_none(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file"):
        credentials.install(str(tmp_path / "nothing"), env)
    with pytest.raises(SetupError, match=r"is not the kaggle.json that Kaggle gives"):
        credentials.install(str(put(tmp_path / "x.json", f'["{KEY}"]')), env)
    with pytest.raises(DataError, match=r"there is nothing at memory://secrets/none.json"):
        credentials.install("memory://secrets/none.json", env)
    assert not (Path(env["HOME"]) / ".kaggle").exists()
