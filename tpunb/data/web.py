"""Files behind http:// and https://, read from any byte on."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from tpunb.data.remote import CHUNK, Checksum, Opened, shown
from tpunb.errors import DataError

PATIENCE = 30.0
"""Seconds without a byte after which a connection counts as lost."""


class WebFile:
    """A file behind a URL. `headers` go with each request, and are never shown."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, name: str = "") -> None:
        self._url = url
        self._headers = dict(headers or {})
        self.name = name or unquote(urlsplit(url).path.rstrip("/").rpartition("/")[2]) or "index"

    @contextlib.contextmanager
    def open(self, start: int, identity: str) -> Iterator[Opened]:
        """See Remote. A server that has another file by now sends that one from its start."""
        headers = dict(self._headers)
        if start:
            headers |= {"Range": f"bytes={start}-", "If-Range": identity}
        try:
            response = ask(urllib.request.Request(self._url, headers=headers))
        except urllib.error.HTTPError as error:
            with error:
                raise refused(error.code, self._url) from None
        except urllib.error.URLError as error:
            if start:  # it was there a moment ago
                raise ConnectionError(str(error.reason)) from None
            raise unreachable(self._url, error.reason) from None
        with response:
            yield _opened(response, start)


def ask(request: urllib.request.Request, patience: float = PATIENCE) -> Any:
    """A response. `urlopen` itself would keep to the proxies that were set at its first use."""
    return urllib.request.build_opener().open(request, timeout=patience)


def _opened(response: Any, start: int) -> Opened:
    found = response.headers
    length = found.get("Content-Length")
    size = int(length) if length is not None else None
    if response.status == 206:
        # 'bytes 100-199/200'
        span, _, whole = found.get("Content-Range", "").removeprefix("bytes ").partition("/")
        start = int(span.partition("-")[0])
        size = int(whole) if whole.isdecimal() else None
    else:
        start = 0
    return Opened(start, size, _identity(found), checksum(found), _chunks(response))


def _identity(headers: Mapping[str, str]) -> str:
    """What If-Range may be given: a strong ETag, or the date."""
    tag = headers.get("ETag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified") or ""


def checksum(headers: Mapping[str, str]) -> Checksum | None:
    """What Google's and other stores say of the content they send.

    `x-goog-hash: crc32c=…,md5=…` is of the object as it is stored, which is something else
    where the server unpacks it on the way.
    """
    given = {}
    if headers.get("x-goog-stored-content-encoding", "identity") == "identity":
        for part in (headers.get("x-goog-hash") or "").split(","):
            name, _, value = part.strip().partition("=")
            given[name] = value
    if "Content-MD5" in headers:
        given["md5"] = headers["Content-MD5"]
    return Checksum.given(given)


def _chunks(response: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(CHUNK)
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from None
        if not chunk:
            return
        yield chunk


def refused(status: int, url: str) -> Exception:
    """What an answer that is none means. An OSError where it may pass."""
    if status in (429, 500, 502, 503, 504):
        return ConnectionError(f"{shown(url)} answers {status} (too busy)")
    words = {
        401: "it wants a login: use the place's own URL scheme, or a signed link",
        403: "you may not read it: is the link still valid, and is it public?",
        404: "there is nothing there: check the spelling",
        410: "it was removed",
        416: "it is shorter than what is here: remove the folder .tpunb-data, and begin anew",
    }
    return DataError(f"{shown(url)} answers {status}: {words.get(status, 'it cannot be had')}")


def unreachable(url: str, reason: object) -> DataError:
    """No way there."""
    host = urlsplit(url).netloc.rpartition("@")[2]
    return DataError(f"{host} cannot be reached ({reason}): {no_internet(os.environ)}")


def no_internet(env: Mapping[str, str]) -> str:
    """What to do about it, here."""
    if "KAGGLE_KERNEL_RUN_TYPE" in env:
        return (
            "in a Kaggle notebook turn Internet on (Settings; it needs a verified phone number), "
            "or add the data with «Add Input»: what is mounted is used without downloading"
        )
    return (
        "is this machine on the internet, and is the name right? A cloud machine without an "
        "external address needs Cloud NAT, or reads from gs:// through Private Google Access"
    )


def plain(text: str) -> str:
    """A message without the signed part of URLs in it."""
    return re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", text)
