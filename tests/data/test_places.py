"""Buckets, folders and web servers: in memory, on this disk, on localhost."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pytest

from tests.data.archives import zipped
from tests.data.test_kaggle import NOISE, brought, files
from tpunb import cli
from tpunb.data import files as places
from tpunb.data import web
from tpunb.data.bring import bring
from tpunb.data.fetch import fetch
from tpunb.data.remote import Checksum
from tpunb.data.send import send
from tpunb.errors import DataError, MissingPackageError


@pytest.fixture(autouse=True)
def _empty_memory() -> None:
    """Of what other tests of this process have put there, too."""
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


class Site:
    """A web server: its pages, how it answers, what it was asked."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.tag = '"1"'
        self.ranges = True
        self.cut: list[int] = []
        self.statuses: list[int] = []
        self.starts: list[int] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = site.pages.get(self.path.partition("?")[0])
                status = site.statuses.pop(0) if site.statuses else 200 if content else 404
                if status != 200 or content is None:
                    self.send_error(status)
                    return
                asked, start = self.headers.get("Range"), 0
                if asked and site.ranges and self.headers["If-Range"] == site.tag:
                    start = int(asked.removeprefix("bytes=").rstrip("-"))
                self.send_response(206 if start else 200)
                if start:
                    span = f"bytes {start}-{len(content) - 1}/{len(content)}"
                    self.send_header("Content-Range", span)
                self.send_header("Content-Length", str(len(content) - start))
                if site.tag:
                    self.send_header("ETag", site.tag)
                self.end_headers()
                site.starts.append(start)
                end = site.cut.pop(0) if site.cut else len(content)
                self.wfile.write(content[start : start + end])

            def log_message(self, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=[0.02])
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("ranges", "tag", "starts"),
    [
        (True, '"1"', [0, 1_000_000, 2_000_000]),
        (False, '"1"', [0, 0, 0]),
        (True, "", [0, 0, 0]),  # nobody knows whether it is the same file
        (True, 'W/"1"', [0, 0, 0]),
    ],
)
def test_the_web_with_lost_connections(
    site: Site, ranges: bool, tag: str, starts: list[int]
) -> None:
    site.pages["/a%20b/noise.bin"] = NOISE
    site.ranges, site.tag, site.cut = ranges, tag, [1_000_000, 1_000_000]
    there, said = brought(f"{site.url}/a%20b/noise.bin?token=5ec2e7")
    assert files(there) == {"noise.bin": NOISE}
    assert site.starts == starts
    assert there == Path("data/noise")
    assert said == f"{site.url}/a%20b/noise.bin: 1 file, 3.0 MB in data/noise"
    kept = (there / ".tpunb-data/record.json").read_text()
    assert "5ec2e7" not in kept
    brought(f"{site.url}/a%20b/noise.bin?token=5ec2e7")
    assert site.starts == starts


def test_archives_are_unpacked_unless_they_are_to_stay(site: Site) -> None:
    site.pages["/x.zip"] = zipped(a=b"1")
    assert files(brought(f"{site.url}/x.zip")[0]) == {"a": b"1"}
    brought(f"{site.url}/x.zip", unpacked=False)  # not what is here
    assert set(files(Path("data/x"))) == {"a", "x.zip"}
    assert list(files(brought(f"{site.url}/x.zip", "kept", unpacked=False)[0])) == ["x.zip"]


def test_what_web_servers_refuse(site: Site) -> None:
    with pytest.raises(DataError, match=r"/none answers 404: there is nothing there"):
        brought(f"{site.url}/none?token=5ec2e7")
    site.pages["/x"] = b"1"
    site.statuses = [403]
    with pytest.raises(DataError, match=r"answers 403: you may not read it"):
        brought(f"{site.url}/x")
    assert not Path("data").exists() or not os.listdir("data")
    site.statuses = [503, 503, 429]
    assert files(brought(f"{site.url}/x")[0]) == {"x": b"1"}
    site.statuses = [503] * 9
    with pytest.raises(DataError, match=r"lost again and again .*answers 503"):
        brought(f"{site.url}/x?other", "elsewhere")


def test_nobody_listens() -> None:
    with pytest.raises(DataError, match=r"127.0.0.1:9 cannot be reached .*is this machine on"):
        brought("http://user:5ec2e7@127.0.0.1:9/x")


@pytest.mark.parametrize("scheme", ["memory://bucket", "file://{}/bucket"])
def test_a_folder_of_a_bucket(scheme: str, tmp_path: Path) -> None:
    root = scheme.format(tmp_path)
    (tmp_path / "bucket/set/b").mkdir(parents=True)
    content = {"a.bin": NOISE, "b/c.txt": b"c", "b/d.zip": zipped(x=b"1"), "empty": b""}
    for name, data in content.items():
        put(f"{root}/set/{name}", data)
    there, said = brought(f"{root}/set")
    assert there == Path("data/set")
    assert files(there) == content  # the archive among them as it is
    assert said.startswith(f"{root}/set: 4 files, 3.0 MB in data/set")
    assert "nothing was fetched" in brought(f"{root}/set")[1]
    assert files(brought(f"{root}/set/b/c.txt", "one")[0]) == {"c.txt": b"c"}
    assert files(brought(f"{root}/set/b/d.zip", "two")[0]) == {"x": b"1"}


def test_of_a_folder_only_what_is_missing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        put(f"memory://bucket/three/{name}", name.encode() * 1000)
    folder = Path("mine")
    folder.mkdir()
    (folder / "a").write_bytes(b"a" * 1000)
    opened: list[str] = []
    real = places.PlaceFile.open
    monkeypatch.setattr(
        places.PlaceFile, "open",
        lambda self, *args: opened.append(self.name) or real(self, *args),
    )  # fmt: skip
    brought("memory://bucket/three", "mine")
    assert sorted(opened) == ["b", "c"]
    (folder / ".tpunb-data/record.json").unlink()
    (folder / "b").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"mine has other files of these names: b. Nothing was"):
        brought("memory://bucket/three", "mine")
    assert (folder / "b").read_bytes() == b"mine"


def test_a_name_that_leads_out_of_the_folder() -> None:
    put("memory://bucket/set/ok", b"1")
    fsspec.filesystem("memory").store["/bucket/set/../evil"] = fsspec.filesystem("memory").store[
        "/bucket/set/ok"
    ]
    with pytest.raises(DataError, match="leads out of the folder"):
        brought("memory://bucket/set")
    assert not list(Path().rglob("evil"))


@pytest.mark.parametrize("path", ["/a%2F..%2F..%2Fevil", "/%2E%2E", "/x/.."])
def test_a_url_that_leads_out_of_the_folder(site: Site, path: str) -> None:
    site.pages[path] = b"1"
    with pytest.raises(DataError, match="would lead out of the folder"):
        brought(site.url + path, "mine")
    assert not list(Path().rglob("evil"))


def test_what_is_not_there_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"there is nothing at memory://bucket/none: check"):
        brought("memory://bucket/none")
    with pytest.raises(DataError, match=r"nothing is known of nosuch:// URLs"):
        brought("nosuch://bucket/x")
    with pytest.raises(DataError, match=r"competitions/titanic is no source: those are URLs"):
        brought("competitions/titanic")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackageError, match=r"gcsfs is needed for gs:// .*`pip install gcsf"):
        brought("gs://bucket/x")
    assert not Path("data").exists() or not os.listdir("data")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("Forbidden: https://storage…/o/x"), "needs the role Storage Object Viewer"),
        (PermissionError(13, "denied"), "needs the role Storage Object Viewer"),
        (type("DefaultCredentialsError", (Exception,), {})("none"), "wants a login, and none was"),
        (OSError("Anonymous caller does not have storage.objects.get, 401"), "wants a login"),
    ],
)
def test_what_buckets_refuse(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", refuse)
    with pytest.raises(DataError, match=words):
        brought("memory://bucket/x")


def test_a_folder_is_for_one_process_at_a_time(site: Site) -> None:
    site.pages["/x"] = b"1"

    def nested(line: str) -> None:
        with pytest.raises(DataError, match="another process brings data to data/x"):
            brought(f"{site.url}/x")

    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        patch.setattr(places, "place", None)
        patch.setattr("tpunb.data.bring._write", lambda *args: nested(""))
        bring(f"{site.url}/x", None, os.environ, lambda line: None)


def test_a_file_where_the_folder_should_be(site: Site) -> None:
    Path("mine").write_text("x")
    with pytest.raises(DataError, match="mine is a file: name a folder with --to"):
        brought(f"{site.url}/x", "mine")


def test_the_interrupt_key_loses_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.pages["/x.bin"] = NOISE

    class Bar:
        total = n = 0

        def update(self, count: int) -> None:
            raise KeyboardInterrupt

    class Bars:
        def __enter__(self) -> Bar:
            return Bar()

        def __exit__(self, *args: object) -> None:
            pass

    with monkeypatch.context() as patch:
        patch.setattr("tpunb.data.progress.bar", lambda *args: Bars())
        with pytest.raises(KeyboardInterrupt):
            brought(f"{site.url}/x.bin")
    assert (
        "interrupted: 1.0 MB are not complete yet; the same again goes on"
        in capsys.readouterr().out
    )
    there, _ = brought(f"{site.url}/x.bin")
    assert files(there) == {"x.bin": NOISE}
    assert site.starts == [0, 1 << 20]


def test_a_full_disk_is_not_a_lost_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pages["/x.bin"] = NOISE

    class Full:
        total = n = 0

        def update(self, count: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"x: the disk is full \(1.0 MB have come\)"):
        fetch(web.WebFile(f"{site.url}/x.bin", name="x"), Path("part"), Full())
    assert site.starts == [0]


def test_what_a_library_calls_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiohttp's errors, below gcsfs, are no OSErrors."""
    put("memory://bucket/x.bin", NOISE)
    lost = type("ClientPayloadError", (Exception,), {"__module__": "aiohttp.client_exceptions"})
    memory = fsspec.get_filesystem_class("memory")
    real, failures = memory._open, [lost("not enough data"), asyncio.TimeoutError()]

    def opened(self: object, *args: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return real(self, *args, **options)

    monkeypatch.setattr(memory, "_open", opened)
    assert files(brought("memory://bucket/x.bin")[0]) == {"x.bin": NOISE}
    assert not failures


def test_from_a_terminal(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.pages["/x"] = b"1"
    assert cli.main(["data", f"{site.url}/x", "--to", "mine"]) == 0
    assert capsys.readouterr().out == f"{site.url}/x: 1 file, 1 B in mine\n"
    assert cli.main(["data", "mine", "--upload", f"file://{Path('there').absolute()}"]) == 0
    assert Path("there/x").read_bytes() == b"1"
    for wrong in (
        ["data"],
        ["data", "--to", "x"],
        ["data", "mine", "--upload", "memory://b/x", "--to", "y"],
        ["data", f"{site.url}/none"],
    ):
        assert cli.main(wrong) == 1
        assert capsys.readouterr().err.startswith("tpunb: ")


def test_a_disk_that_fails_is_one_message(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.pages["/x"] = b"1"

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("tpunb.data.bring._write", fail)
    assert cli.main(["data", f"{site.url}/x"]) == 1
    assert "Input/output error; what has come is kept" in capsys.readouterr().err


def test_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"123456789")
    given = {"md5": "JfnnlDI7RTiF9RgfG2JNCw=="}
    found = Checksum.given(given)
    assert found is not None
    assert found.of(path) == found.hexadecimal == "25f9e794323b453885f5181f1b624d0b"
    assert Checksum.given({"md5": "no base64!"}) is None
    assert Checksum.given({}) is None


def test_the_checksum_of_composite_objects(tmp_path: Path) -> None:
    pytest.importorskip("google_crc32c")
    path = tmp_path / "x"
    path.write_bytes(b"123456789")
    found = Checksum.given({"crc32c": "4waSgw=="})  # the check value of CRC-32C
    assert found is not None
    assert found.of(path) == found.hexadecimal == "e3069283"


def sent(folder: str, url: str) -> str:
    said: list[str] = []
    send(Path(folder), url, said.append)
    return "\n".join(said)


def test_a_folder_is_sent_and_comes_back(site: Site) -> None:
    site.pages["/x.zip"] = zipped(**{"a.bin": NOISE, "b/c.txt": b"c", "empty": b""})
    there, _ = brought(f"{site.url}/x.zip", "mine")
    url = "memory://bucket/results"
    assert sent("mine", url) == f"{url}: 3 files, 3.0 MB sent"
    assert files(brought(url, "back")[0]) == files(there)
    assert sent("mine", url) == f"{url}: 0 files, 0 B sent, 3 were there already"
    (there / "new").write_bytes(b"n")
    assert sent("mine", url + "/") == f"{url}/: 1 files, 1 B sent, 3 were there already"


def test_who_may_only_write_objects_can_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError("storage.buckets.create")

    Path("mine/deep").mkdir(parents=True)
    Path("mine/deep/a").write_bytes(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.get_filesystem_class("memory"), "makedirs", refuse)
        sent("mine", "memory://bucket/results")
    assert set(fsspec.filesystem("memory").store) == {"/bucket/results/deep/a"}
    sent("mine", f"file://{Path('there').absolute()}")
    assert Path("there/deep/a").read_bytes() == b"a"


def test_nothing_is_overwritten_there() -> None:
    Path("mine").mkdir()
    Path("mine/a").write_bytes(b"new")
    Path("mine/b").write_bytes(b"b")
    put("memory://bucket/results/a", b"old")
    with pytest.raises(DataError, match=r"has other files of these names: a. Nothing was sent"):
        sent("mine", "memory://bucket/results")
    assert set(fsspec.filesystem("memory").store) == {"/bucket/results/a"}
    with pytest.raises(DataError, match=r"results/a is a file: name a folder"):
        sent("mine", "memory://bucket/results/a")


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder none"):
        sent("none", "memory://bucket/x")
    Path("empty").mkdir()
    with pytest.raises(DataError, match="empty is empty"):
        sent("empty", "memory://bucket/x")
    Path("empty/x").touch()
    with pytest.raises(DataError, match="nothing can be sent to http://x"):
        sent("empty", "http://x/y")
    sent("empty/x", "memory://bucket/one")
    assert set(fsspec.filesystem("memory").store) == {"/bucket/one/x"}
