"""Data from buckets (in memory), folders (on disk) and web servers (on localhost)."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fsspec
import pytest

from tests.data.support import NOISE, downloaded, files, zipped
from tpunb import cli, data
from tpunb.data import DataOptions
from tpunb.errors import DataError


@pytest.fixture(autouse=True)
def _empty_memory() -> None:
    """Clear what this and other tests of this process have put into fsspec's memory."""
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


class Site:
    """A web server: its pages, settings of its answers, and the requests it has received."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.cut: list[int] = []
        self.status = 200
        self.sent = 0
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = site.pages.get(self.path.partition("?")[0])
                if content is None or site.status != 200:
                    self.send_error(404 if content is None else site.status)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "GET":
                    site.sent += 1
                    self.wfile.write(content[: site.cut.pop(0) if site.cut else None])

            do_HEAD = do_GET  # noqa: N815

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


def test_a_file_of_the_web_comes_once_and_whole(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.pages["/a%20b/noise.bin"] = NOISE
    site.cut = [1 << 20]
    url = f"{site.url}/a%20b/noise.bin?token=5ec2e7"
    assert cli.main(["data", url]) == 1
    said = capsys.readouterr().err
    assert "Complete files are kept: to continue, run it again" in said
    assert "5ec2e7" not in said
    assert not files("data/noise")
    assert cli.main(["data", url]) == 0
    assert capsys.readouterr().out == (
        f"{site.url}/a%20b/noise.bin is in data/noise (1 file, 3.0 MB); downloaded\n"
    )
    assert files("data/noise") == {"noise.bin": NOISE}
    assert "5ec2e7" not in "".join(p.read_text() for p in Path("data/noise/.tpunb-data").iterdir())
    sent = site.sent
    assert "nothing was downloaded" in downloaded(url, "data/noise")
    assert site.sent == sent
    Path("data/noise/noise.bin").unlink()
    downloaded(url, "data/noise")
    assert files("data/noise") == {"noise.bin": NOISE}


def test_a_folder_continues_with_the_file_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        put(f"memory://bucket/three/{name}", name.encode() * 1000)
    memory = fsspec.get_filesystem_class("memory")
    real, failing, fetched = memory.get_file, ["c"], ""

    def get_file(self: object, path: str, here: str, **options: object) -> None:
        nonlocal fetched
        if path[-1] in failing:
            Path(here).write_bytes(b"half")
            raise failing.pop() and ConnectionResetError("reset")
        fetched += path[-1]
        real(self, path, here, **options)

    monkeypatch.setattr(memory, "get_file", get_file)
    with pytest.raises(DataError, match=r"ConnectionResetError: reset\. Complete files"):
        downloaded("memory://bucket/three", "mine")
    assert not files("mine")
    Path("mine/b").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"mine has other files with these names: b. Nothing was"):
        downloaded("memory://bucket/three", "mine")
    assert files("mine") == {"b": b"mine"}
    Path("mine/b").unlink()
    downloaded("memory://bucket/three", "mine")
    assert files("mine") == {name: name.encode() * 1000 for name in "abc"}
    assert fetched == "abc"


def test_of_calls_at_once_one_downloads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pages["/x"] = NOISE
    said: list[str] = []
    waiting, real = Event(), data._fetch

    def say(line: str) -> None:
        said.append(line.rpartition("; ")[2])
        if len(said) == 1:
            waiting.set()

    def fetch(*args: Any) -> object:
        assert waiting.wait(60)
        return real(*args)

    monkeypatch.setattr(data, "_fetch", fetch)
    options = DataOptions(f"{site.url}/x", "mine")
    calls = [Thread(target=data.run, args=(options, say)) for _ in range(2)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert sorted(said) == [
        "another download uses mine/.tpunb-data: waiting for its end",
        "downloaded",
        "nothing was downloaded",
    ]
    assert site.sent == 1
    assert files("mine") == {"x": NOISE}


def test_nothing_is_overwritten(site: Site) -> None:
    site.pages["/x.zip"] = zipped(**{"a.txt": b"new", "same.txt": b"same", "b/c.txt": b"c"})
    Path("mine").mkdir()
    Path("mine/a.txt").write_bytes(b"mine")
    Path("mine/same.txt").write_bytes(b"same")
    with pytest.raises(DataError, match=r"other files with these names: a.txt. Nothing was over"):
        downloaded(f"{site.url}/x.zip", "mine")
    Path("mine/a.txt").unlink()
    Path("mine/b").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"FileExistsError: .*'mine/b'"):
        downloaded(f"{site.url}/x.zip", "mine")
    assert files("mine") == {"b": b"mine", "same.txt": b"same"}
    Path("mine/b").unlink()
    downloaded(f"{site.url}/x.zip", "mine")
    assert files("mine") == {"a.txt": b"new", "same.txt": b"same", "b/c.txt": b"c"}
    assert site.sent == 1  # the archive was not downloaded again


def test_a_broken_archive_is_downloaded_again(site: Site) -> None:
    good = zipped(x=NOISE)
    site.pages["/a.zip"] = good[:-9] + bytes(9)
    with pytest.raises(DataError, match=r"/a.zip: BadZipFile: .*to continue, run it again"):
        downloaded(f"{site.url}/a.zip", "to")
    site.pages["/a.zip"] = good
    downloaded(f"{site.url}/a.zip", "to")
    assert files("to") == {"x": NOISE}


def test_what_web_servers_refuse(site: Site) -> None:
    with pytest.raises(DataError, match=r"/none: ClientResponseError: 404, .*Not Found"):
        downloaded(f"{site.url}/none?token=5ec2e7", "to")
    site.pages["/x"], site.status = b"1", 403
    with pytest.raises(DataError, match=r"/x: ClientResponseError: 403, .*Forbidden"):
        downloaded(f"{site.url}/x", "to")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/x: ClientConnector"):
        downloaded("http://user:5ec2e7@127.0.0.1:9/x", "to")
    assert not Path("to").exists()


@pytest.mark.parametrize("scheme", ["memory://bucket", "file://{}/bucket"])
def test_a_folder_of_a_bucket(scheme: str, tmp_path: Path) -> None:
    root = scheme.format(tmp_path)
    (tmp_path / "bucket/set/b").mkdir(parents=True)
    content = {"a.bin": NOISE, "b/c.txt": b"c", "b/d.zip": zipped(x=b"1"), "empty": b""}
    for name, stored in content.items():
        put(f"{root}/set/{name}", stored)
    assert downloaded(f"{root}/set", "all").startswith(f"{root}/set is in all (4 files, 3.0 MB)")
    assert files("all") == content  # the archive in it stays packed
    assert "nothing was downloaded" in downloaded(f"{root}/set", "all")
    downloaded(f"{root}/set/b/c.txt", "two")
    downloaded(f"{root}/set/b/d.zip", "two")
    assert files("two") == {"c.txt": b"c", "x": b"1"}


def test_a_name_that_leads_out_of_the_folder(site: Site) -> None:
    put("memory://bucket/set/ok", b"1")
    store = fsspec.filesystem("memory").store
    store["/bucket/set/../evil"] = store["/bucket/set/ok"]
    with pytest.raises(DataError, match="leads out of the folder"):
        downloaded("memory://bucket/set", "to/set")
    assert not Path("to").exists()
    site.pages["/a%2F..%2F..%2Fevil"] = b"1"
    downloaded(f"{site.url}/a%2F..%2F..%2Fevil", "to/set")
    assert files("to") == {"set/evil": b"1"}


def test_what_is_not_there_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/none does not exist"):
        downloaded("memory://bucket/none", "to")
    with pytest.raises(DataError, match=r"nosuch://bucket/x: ValueError: Protocol not known"):
        downloaded("nosuch://bucket/x", "to")
    with pytest.raises(DataError, match=r"http://\[x: ValueError: Invalid IPv6 URL"):
        downloaded("http://[x", "to")
    with pytest.raises(DataError, match=r"invalid source 'competitions/titanic': expected a URL"):
        downloaded("competitions/titanic", "to")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"gs://bucket/x: ImportError: .*install gcsfs"):
        downloaded("gs://bucket/x", "to")
    assert not Path("to").exists()


def test_a_disk_that_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pages["/x"] = b"1"
    Path("file").touch()
    with pytest.raises(DataError, match=r"/x: NotADirectoryError: .*'file/\.tpunb-data'"):
        downloaded(f"{site.url}/x", "file")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data, "write_json", fail)
    with pytest.raises(DataError, match=r"No space left on device\. Complete files"):
        downloaded(f"{site.url}/x", "to")


def sent(folder: str, url: str) -> str:
    said: list[str] = []
    data.run(DataOptions(folder, upload=url), said.append)
    return "\n".join(said)


def test_a_folder_is_sent_and_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    put("memory://bucket/x.zip", zipped(**{"a.bin": NOISE[:900_000], "b/c.txt": b"c", "e": b""}))
    downloaded("memory://bucket/x.zip", "mine")
    url = "memory://bucket/results"
    assert sent("mine", url) == f"{url}: 3 files, 900 kB uploaded"
    downloaded(url, "back")
    assert files("back") == files("mine")
    Path("mine/new").write_bytes(b"n")
    assert sent("mine", url) == f"{url}: 1 file, 1 B uploaded; 3 of 4 files were already there"
    assert cli.main(["data", "mine", "--upload", f"file://{Path('there').absolute()}/x"]) == 0
    assert "4 files, 900 kB uploaded" in capsys.readouterr().out
    assert files("there/x") == files("mine")
    sent("mine/new", "memory://bucket/one")
    assert fsspec.filesystem("memory").cat_file("/bucket/one/new") == b"n"


def test_what_cannot_be_sent() -> None:
    Path("mine").mkdir()
    with pytest.raises(DataError, match="mine is empty or does not exist"):
        sent("mine", "memory://bucket/x")
    Path("mine/a").write_bytes(b"new")
    Path("mine/b").write_bytes(b"b")
    put("memory://bucket/results/a", b"old")
    with pytest.raises(DataError, match=r"has other files with these names: a. Nothing was over"):
        sent("mine", "memory://bucket/results")
    assert set(fsspec.filesystem("memory").store) == {"/bucket/results/a"}
    with pytest.raises(DataError, match="SOURCE is empty"):
        sent("", "memory://bucket/x")
    with pytest.raises(DataError, match="cannot upload to http://x"):
        sent("mine", "http://x/y")
    with pytest.raises(DataError, match="--upload cannot be combined with --to"):
        data.run(DataOptions("mine", "to", "memory://bucket/x"), print)
