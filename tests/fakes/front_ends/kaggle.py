"""A stand-in for Kaggle that speaks its protocol: its client in a kernel, and its service.

`python -m tests.fakes.front_ends.kaggle -f FILE` is an IPython kernel with the modules
`kaggle_session` and `kaggle_web_client`; `Service` is the other end, on this machine. For tests:
requests and answers are those of Kaggle/docker-python 78aaa43 (patches/, tests/).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType, TracebackType
from typing import Any
from urllib.error import HTTPError, URLError

ENDPOINT = "/requests/GetKernelRunSourceForCaipRequest"


class CredentialError(Exception):
    """No token, or one that is not accepted."""


class BackendError(Exception):
    """An answer that is none."""


class UserSessionClient:
    """Asks the service that KAGGLE_URL_BASE names, with the session's token."""

    def __init__(self) -> None:
        token = os.environ.get("KAGGLE_USER_SECRETS_TOKEN")
        if token is None:
            raise CredentialError("A JWT Token is required to call Kaggle")
        self._url = os.environ["KAGGLE_URL_BASE"] + ENDPOINT
        self._headers = {
            "Content-type": "application/json",
            "X-Kaggle-Authorization": f"Bearer {token}",
        }

    def get_exportable_ipynb(self) -> dict[str, Any]:
        """The draft in the editor: its JSON text is the value of 'source'."""
        body = json.dumps({"UseDraft": True}).encode()
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=40) as response:
                reply = json.loads(response.read())
        except HTTPError as error:
            error.close()
            if error.code in (401, 403):
                raise CredentialError(f"Service responded with error code {error.code}.") from error
            raise BackendError("Unexpected response from the service.") from error
        except (URLError, TimeoutError) as error:
            raise ConnectionError("Connection error trying to communicate with service.") from error
        if not reply.get("wasSuccessful") or "result" not in reply:
            raise BackendError(f"Unexpected response from the service. Response: {reply}.")
        result: dict[str, Any] = reply["result"]
        return result


class Service:
    """Kaggle's service, for one session, as a context."""

    def __init__(self, token: str = "a token") -> None:
        self.token = token
        self.source: str | None = None
        """The draft's JSON text; None: the service fails."""
        self.delay = threading.Event()
        """Answers wait for this; it is set at first."""
        self.delay.set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.delay.wait(60)
                allowed = self.headers["X-Kaggle-Authorization"] == f"Bearer {service.token}"
                known = self.path == ENDPOINT and asked == {"UseDraft": True}
                self.send_response(200 if allowed and known else 404 if allowed else 401)
                self.end_headers()
                if allowed and known:
                    failed: dict[str, Any] = {"wasSuccessful": False}
                    good = {"wasSuccessful": True, "result": {"source": service.source}}
                    answer = good if service.source is not None else failed
                    self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def environ(self) -> dict[str, str]:
        """What a kernel of the session has in its environment."""
        return {
            "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
            "KAGGLE_URL_BASE": f"http://127.0.0.1:{self._server.server_port}",
            "KAGGLE_USER_SECRETS_TOKEN": self.token,
        }

    def __enter__(self) -> Service:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.delay.set()
        self._server.shutdown()
        self._server.server_close()


def modules() -> dict[str, ModuleType]:
    """The modules that the image brings, by name."""
    made = {name: ModuleType(name) for name in ("kaggle_session", "kaggle_web_client")}
    made["kaggle_session"].__dict__["UserSessionClient"] = UserSessionClient
    made["kaggle_web_client"].__dict__.update(
        BackendError=BackendError, CredentialError=CredentialError
    )
    return made


if __name__ == "__main__":
    from ipykernel.kernelapp import IPKernelApp

    sys.modules.update(modules())
    IPKernelApp.launch_instance()
