"""A bucket: moto's S3 server, whose answers a test makes slow or failing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

NAME = "bucket"


@dataclass
class FakeBucket:
    """The server, and what it does to the next requests."""

    port: int = 0
    trouble: list[str] = field(default_factory=list)
    """Of the next writes, one each: 'fail' (503) or 'slow'."""
    writes: list[str] = field(default_factory=list)
    """The paths that were written."""

    @property
    def url(self) -> str:
        return f"s3://{NAME}/runs"

    @property
    def env(self) -> Mapping[str, str]:
        """By which s3fs, boto3 and TensorBoard find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "S3_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def answer(
        self, app: Any, environ: dict[str, Any], start: Callable[..., Any]
    ) -> Iterable[bytes]:
        """One request."""
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].count("/") > 1:
            what = self.trouble.pop(0) if self.trouble else ""
            if what == "slow":
                time.sleep(0.5)
            if what == "fail":
                start("503 Service Unavailable", [("Content-Length", "0")])
                return [b""]
            self.writes.append(environ["PATH_INFO"].removeprefix(f"/{NAME}/runs/"))
        answered: Iterable[bytes] = app(environ, start)
        return answered


@contextmanager
def bucket() -> Iterator[FakeBucket]:
    """A server with one empty bucket."""
    fake = FakeBucket()
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1", 0, lambda environ, start: fake.answer(app, environ, start), threaded=True
    )
    server.daemon_threads = True
    fake.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=fake.env["AWS_ENDPOINT_URL"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    s3_backends.reset()
    client.create_bucket(Bucket=NAME)
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
