"""A stand-in for Kaggle's service and its file store, which speaks their protocol. For tests.

Requests and answers are those of kagglesdk 0.1.37 and kagglehub 1.0.2: JSON over POST to
`/api/v1/<service>/<method>`; a download is answered by a redirect to a signed URL of another
server, with the headers of Google's store. It is reached without touching Kaggle's client:
`KAGGLE_API_ENVIRONMENT=LOCALHOST` has that speak http to `localhost`, and a proxy, which is
this server, takes what is meant for any host.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

STORE = "store.test"
SECRET = "X-Goog-Signature=5ec2e7"


@dataclass
class Stored:
    """A file of the store."""

    content: bytes
    cut: list[int] = field(default_factory=list)
    """After so many bytes the connection is lost; for the next requests, one each."""


class FakeKaggle:
    """Kaggle, as a context. Fill `files` before use."""

    def __init__(self, username: str = "somebody", key: str = "a-key") -> None:
        self.login = "Basic " + base64.b64encode(f"{username}:{key}".encode()).decode()
        self.username, self.key = username, key
        self.files: dict[str, Stored] = {}
        """By what is asked for: 'competitions/NAME', 'datasets/OWNER/NAME[/versions/N]',
        'models/OWNER/MODEL/FRAMEWORK/VARIATION/VERSION/FILE'. A dataset without a version has 1."""
        self.rules: set[str] = set()
        """Competitions whose rules are not accepted."""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        """Methods and what they were asked."""
        self.mounts: dict[str, str] = {}
        """A notebook's inputs: where each is mounted, by 'datasets/OWNER/NAME' and so on."""
        self.leaked = False
        """Whether a login was sent to the store."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.02])

    @property
    def proxy(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environ(self) -> dict[str, str]:
        """What makes this the Kaggle of a process. Unset: no_proxy and other proxies."""
        return {"KAGGLE_API_ENVIRONMENT": "LOCALHOST", "http_proxy": self.proxy}

    @property
    def notebook_environ(self) -> dict[str, str]:
        """What a process of a Kaggle notebook has besides: a proxy that mounts inputs."""
        return {
            "KAGGLE_KERNEL_RUN_TYPE": "Batch",
            "KAGGLE_DATA_PROXY_URL": self.proxy,
            "KAGGLE_USER_SECRETS_TOKEN": "a-token",
            "KAGGLE_DATA_PROXY_TOKEN": "a-token",
        }

    def __enter__(self) -> FakeKaggle:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, asked: dict[str, Any], login: str) -> tuple[int, Any]:
        """Status and JSON, or the path of a file to redirect to."""
        self.asked.append((method, asked))
        if login and login != self.login:
            return 401, {"code": 401, "message": "Unauthenticated"}
        if method == "models.ModelApiService/GetModelInstance":
            model = _model(asked)
            versions = [
                int(p[len(model) :].split("/")[0]) for p in self.files if p.startswith(model)
            ]
            if not versions:
                return 404, {"code": 404, "message": "Not found"}
            return 200, {"id": 1, "slug": asked["instanceSlug"], "versionNumber": max(versions)}
        if method == "models.ModelApiService/ListModelInstanceVersionFiles":
            folder = f"{_model(asked)}{asked['versionNumber']}/"
            names = [path[len(folder) :] for path in self.files if path.startswith(folder)]
            return 200, {"files": [{"name": name} for name in names], "nextPageToken": ""}
        path = _path(method, asked)
        if not login:
            return 401, {"code": 401, "message": "Unauthenticated"}
        if path.split("/")[1] in self.rules and path.startswith("competitions/"):
            words = "You must accept this competition's rules before you'll be able to download"
            return 403, {"code": 403, "message": words}
        if method == "datasets.DatasetApiService/GetDataset":
            known = [name for name in self.files if f"{name}/".startswith(f"{path}/")]
            versions = [int(name.split("/")[4]) for name in known if "/versions/" in name]
            if not known:
                return 404, {"code": 404, "message": "Not found"}
            return 200, {"id": 1, "currentVersionNumber": max(versions, default=1)}
        if path not in self.files:
            path = path.replace("/versions/1", "", 1)
        if path not in self.files:
            return 404, {"code": 404, "message": "Not found"}
        return 302, path

    def mount(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What a Kaggle notebook's proxy says when an input is to be mounted."""
        [(kind, names)] = asked.items()
        path = "/".join(["datasets", *names.values()])
        if kind == "competitionRef":
            path = f"competitions/{names['CompetitionSlug']}"
        elif kind == "modelRef":
            path = "/".join(["models", *names.values()])
        self.asked.append((kind, names))
        if path not in self.mounts:
            return {"wasSuccessful": False, "message": "Not found"}
        return {"wasSuccessful": True, "result": {"mountSlug": self.mounts[path]}}


def _model(asked: dict[str, Any]) -> str:
    framework = asked["framework"].removeprefix("MODEL_FRAMEWORK_").replace("_", "").lower()
    return f"models/{asked['ownerSlug']}/{asked['modelSlug']}/{framework}/{asked['instanceSlug']}/"


def _path(method: str, asked: dict[str, Any]) -> str:
    if method == "competitions.CompetitionApiService/DownloadDataFiles":
        parts = ["competitions", asked["competitionName"]]
    elif method.startswith("datasets.DatasetApiService/"):
        version = asked.get("datasetVersionNumber")
        parts = ["datasets", asked["ownerSlug"], asked["datasetSlug"]]
        parts += ["versions", str(version)] if version else []
    elif method == "models.ModelApiService/DownloadModelInstanceVersion":
        parts = [f"{_model(asked)}{asked['versionNumber']}", asked.get("path")]
    else:
        return "nothing/known"
    return "/".join(part for part in parts if part)


def _handler(kaggle: FakeKaggle) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._json(404, {"code": 404, "message": "Not found"})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            url = urlsplit(self.path)  # a proxy is sent whole URLs
            if url.path.startswith("/kaggle-jwt-handler/"):
                return self._json(200, kaggle.mount(asked))
            method = url.path.removeprefix("/api/v1/")
            status, answer = kaggle.answer(method, asked, self.headers.get("Authorization", ""))
            if not status:
                self.close_connection = True
                return None
            if status != 302:
                return self._json(status, answer)
            self.send_response(302)
            self.send_header("Location", f"http://{STORE}/{answer}?{SECRET}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            stored = kaggle.files.get(unquote(url.path.lstrip("/")))
            if "Authorization" in self.headers:
                kaggle.leaked = True
            if stored is None or url.netloc != STORE or url.query != SECRET:
                return self._json(403 if stored else 404, {"code": 404, "message": "Not found"})
            content = stored.content
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            digest = base64.b64encode(hashlib.md5(content).digest()).decode()
            self.send_header("x-goog-hash", f"crc32c=AAAAAA==,md5={digest}")
            self.end_headers()
            self.close_connection = True
            with contextlib.suppress(ConnectionError):  # who asks may have seen enough
                self.wfile.write(content[: stored.cut.pop(0) if stored.cut else None])

        def _json(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    return Handler
