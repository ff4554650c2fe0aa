"""A stand-in for the metadata server of Google's machines, well and unwell."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

Behaviour = Literal["answers", "stalls", "refuses", "not Google's"]
_PREFIX = "/computeMetadata/v1/"


class FakeMetadataServer:
    """Serves keys below /computeMetadata/v1/; those that are not there are 404.

    `values`: by key ('instance/preempted'), or by an attribute's name alone ('tpu-env'). They may
    change. 'stalls' takes connections and never answers; 'refuses' is a port at which nobody is.
    """

    def __init__(
        self,
        values: Mapping[str, str],
        behaviour: Behaviour = "answers",
        address: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.values = values
        self.asked: list[str] = []
        """The keys that were asked for, in order."""
        self._behaviour = behaviour
        self._ending = threading.Event()
        self._server = ThreadingHTTPServer(address, self._handler())
        self.host = f"{address[0]}:{self._server.server_port}"
        """host:port, as GCE_METADATA_HOST has it."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.05])

    def __enter__(self) -> FakeMetadataServer:
        if self._behaviour == "refuses":
            self._server.server_close()
        else:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        if self._behaviour != "refuses":
            self._server.shutdown()
            self._server.server_close()  # waits for the requests
            self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                key = self.path.removeprefix(_PREFIX).partition("?")[0]
                server.asked.append(key)
                if server._behaviour == "stalls":
                    server._ending.wait()
                    return
                value = server.values.get(key, server.values.get(key.rpartition("/")[2]))
                asked = self.headers.get("Metadata-Flavor") == "Google"
                self.send_response(403 if not asked else 404 if value is None else 200)
                if server._behaviour == "answers":
                    self.send_header("Metadata-Flavor", "Google")
                self.end_headers()
                self.wfile.write((value or "").encode())

            def log_message(self, *args: object) -> None:
                """Quiet."""

        return Handler
