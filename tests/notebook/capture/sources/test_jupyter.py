"""Jupyter servers, real ones, and what they leave in the environment of kernels.

JupyterLab and Notebook 7 in a browser are in `tests/long/test_frontends.py`.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from tests.drivers.kernel import PATIENCE, until
from tests.notebook.capture.fronts import (
    environ,
    kernel,
    program,
    write,
)
from tpunb.notebook.capture.sources.base import LocatedNotebook
from tpunb.notebook.capture.sources.jupyter import from_server, from_session_name

PASSWORD = "argon2:$argon2id$v=19$m=10240,t=10,p=8$c29tZXNhbHQ$abcdefghijklmnopqrstuvwxyz012345"


@dataclass
class Running:
    """A Jupyter server, and the folder of its notebooks."""

    folder: Path
    info: dict[str, Any]

    def ask(self, method: str, address: str, **body: Any) -> Any:
        request = urllib.request.Request(
            f"{self.info['url']}{address}",
            json.dumps(body).encode() if body else None,
            {"Authorization": f"token {self.info['token']}"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read() or b"null")


@contextmanager
def server(tmp_path: Path, *options: str) -> Iterator[Running]:
    folder, runtime = tmp_path / "notebooks", tmp_path / "RUNTIME"
    folder.mkdir(exist_ok=True)
    env = environ(tmp_path)
    env |= {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    words = ["-m", "jupyter_server", "--no-browser", "--allow-root", "--ServerApp.port=0"]
    with (
        open(tmp_path / "server.log", "w") as log,
        subprocess.Popen(
            [sys.executable, *words, f"--ServerApp.root_dir={folder}", *options],
            env=env,
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            yield Running(folder, until(lambda: _info(runtime), "the server"))
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _info(folder: Path) -> dict[str, Any] | None:
    for path in folder.glob("jpserver-*.json"):
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            with urllib.request.urlopen(f"{found['url']}api", timeout=5):  # needs no token
                return found
        except (json.JSONDecodeError, OSError):  # it is being written, or does not listen yet
            return None
    return None


@contextmanager
def client(tmp_path: Path, kernel: str) -> Iterator[BlockingKernelClient]:
    made = BlockingKernelClient(connection_file=str(tmp_path / f"RUNTIME/kernel-{kernel}.json"))
    made.load_connection_file()
    made.start_channels()
    try:
        made.kernel_info(reply=True, timeout=PATIENCE)  # sent when the kernel is there
        yield made
    finally:
        made.stop_channels()


@pytest.mark.usefixtures("starts_processes")
def test_a_server_with_a_certificate_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")]
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*make.split(), "-keyout", files[0], "-out", files[1]], check=True, capture_output=True
    )
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # not for this machine
    path = write(tmp_path / "in.ipynb", "a = 1")
    body = b'[{"kernel": {"id": "k"}, "path": "in.ipynb", "type": "notebook"}]'
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])
    with Answers(tmp_path, body, tls=context):
        assert from_server(asking(tmp_path)) == LocatedNotebook("the Jupyter server", path)


class Answers(HTTPServer):
    """A server that answers everything with one text."""

    def __init__(
        self, folder: Path, body: bytes, status: int = 200, tls: ssl.SSLContext | None = None
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append((self.path, self.headers["Authorization"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        asked: list[tuple[str, str | None]] = []
        self.asked = asked
        super().__init__(("127.0.0.1", 0), Handler)
        scheme = "http"
        if tls is not None:
            self.socket, scheme = tls.wrap_socket(self.socket, server_side=True), "https"
        info = {
            "url": f"{scheme}://127.0.0.1:{self.server_port}/",
            "token": "",
            "root_dir": str(folder),
        }
        (folder / "jpserver-1.json").write_text(json.dumps(info))

    def __enter__(self) -> Answers:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *args: Any) -> None:
        self.shutdown()
        self.server_close()


def asking(folder: Path, **environ: str) -> Any:
    made = kernel(None, ("a = 1",), JPY_PARENT_PID="1", **environ)
    return replace(made, connection_file=str(folder / "kernel-k.json"))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"<html>log in</html>", 200),
        (b"{}", 200),
        (b"[3, {}, {'kernel': 3}]".replace(b"'", b'"'), 200),
        (b'[{"kernel": {"id": "k"}, "path": "gone.ipynb", "type": "notebook"}]', 200),
        (b'[{"kernel": {"id": "k"}, "path": "in.ipynb", "type": "console"}]', 200),
        (b'[{"kernel": {"id": "other"}, "path": "in.ipynb", "type": "notebook"}]', 200),
        (b"[]", 403),
        (b"\xff", 200),
    ],
)
def test_answers_that_say_nothing(folder: Path, body: bytes, status: int) -> None:
    with Answers(folder, body, status) as answers:
        assert from_server(asking(folder)) is None
    assert answers.asked == [("/api/sessions", None)]


def test_the_token_of_jupyterhub(folder: Path) -> None:
    body = b'[{"kernel": {"id": "k"}, "path": "in.ipynb", "type": "notebook"}]'
    with Answers(folder, body) as answers:
        found = from_server(asking(folder, JUPYTERHUB_API_TOKEN="hub"))
    assert found == LocatedNotebook("the Jupyter server", folder / "in.ipynb")
    assert answers.asked == [("/api/sessions", "token hub")]
    # It has ended and left its file.
    assert from_server(asking(folder)) is None


@pytest.mark.parametrize(
    "info", ["", "[]", '{"url": 3}', '{"root_dir": "/", "url": "http+unix://x"}']
)
def test_files_of_servers_that_cannot_be_asked(folder: Path, info: str) -> None:
    (folder / "jpserver-1.json").write_text(info)
    assert from_server(asking(folder)) is None
    (folder / "jpserver-1.json").unlink()
    assert from_server(asking(folder)) is None
    assert from_server(kernel()) is None


@pytest.mark.usefixtures("starts_processes")
def test_session_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = folder / "in.ipynb"
    assert from_session_name(kernel(JPY_SESSION_NAME=str(path))) == LocatedNotebook(
        "JPY_SESSION_NAME", path
    )
    for name in ("", "in.ipynb", str(folder), str(folder / "renamed.ipynb")):
        assert from_session_name(kernel(JPY_SESSION_NAME=name)) is None
    # A program that was started in a kernel, and starts one, hands on that kernel's.
    with program(folder, "papermill", "other.ipynb", "o.ipynb", JPY_SESSION_NAME=str(path)) as pid:
        assert from_session_name(kernel(JPY_SESSION_NAME=str(path), JPY_PARENT_PID=pid)) is None
        own = kernel(JPY_SESSION_NAME=str(folder / "out.ipynb"), JPY_PARENT_PID=pid)
        assert from_session_name(own) is not None
