"""A stand-in for the metadata server of Google's machines: the keys that it is given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def metadata_server(values: dict[str, str], flavour: str = "Google") -> Iterator[str]:
    """Serve `values` under /computeMetadata/v1/; gives host:port. `values` may change."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = values.get(self.path.removeprefix("/computeMetadata/v1/").partition("?")[0])
            asked = self.headers.get("Metadata-Flavor") == "Google"
            self.send_response(403 if not asked else 404 if value is None else 200)
            self.send_header("Metadata-Flavor", flavour)
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
