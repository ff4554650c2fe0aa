"""Data from buckets (in memory), folders (on disk) and web servers (on localhost)."""

from __future__ import annotations

import errno
import io
import os
import sys
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from tests.data.archives import zipped
from tests.data.support import NOISE, downloaded, files
from tpunb import cli, data
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
        self.statuses: list[int] = []
        self.sent = 0
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = site.pages.get(self.path.partition("?")[0])
                status = site.statuses.pop(0) if site.statuses else 200 if content else 404
                if status != 200 or content is None:
                    self.send_error(status)
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


def test_a_file_of_the_web_comes_once_and_whole(site: Site) -> None:
    site.pages["/a%20b/noise.bin"] = NOISE
    site.cut = [1 << 20]
    url = f"{site.url}/a%20b/noise.bin?token=5ec2e7"
    with pytest.raises(DataError, match="Run it again: complete files are kept") as failed:
        downloaded(url)
    assert "5ec2e7" not in str(failed.value)
    assert not files(Path("data/noise"))
    folder, messages = downloaded(url)
    assert files(folder) == {"noise.bin": NOISE}
    assert folder == Path("data/noise")
    assert messages == f"{site.url}/a%20b/noise.bin: 1 file, 3.0 MB in data/noise"
    assert os.listdir(folder / data.WORK) == ["record.json"]
    assert "5ec2e7" not in (folder / data.WORK / "record.json").read_text()
    sent = site.sent
    assert "nothing was downloaded" in downloaded(url)[1]
    assert site.sent == sent


def test_of_a_folder_only_what_is_missing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        put(f"memory://bucket/three/{name}", name.encode() * 1000)
    Path("mine").mkdir()
    Path("mine/a").write_bytes(b"A" * 1000)  # with the size of the other: kept as it is
    memory = fsspec.get_filesystem_class("memory")
    real, failing = memory.get_file, ["c"]

    def get_file(self: object, path: str, *args: object, **options: object) -> None:
        if path[-1] in failing:
            raise failing.pop() and ConnectionResetError("reset")
        fetched.append(path[-1])
        real(self, path, *args, **options)

    fetched: list[str] = []
    monkeypatch.setattr(memory, "get_file", get_file)
    with pytest.raises(DataError, match=r"ConnectionResetError: reset\. Run it again: complete"):
        downloaded("memory://bucket/three", "mine")
    assert set(files(Path("mine"))) == {"a"}
    downloaded("memory://bucket/three", "mine")
    assert fetched == ["b", "c"]
    Path("mine/.tpunb-data/record.json").unlink()
    Path("mine/b").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"mine has other files with these names: b. Nothing was"):
        downloaded("memory://bucket/three", "mine")
    assert Path("mine/b").read_bytes() == b"mine"


def test_a_folder_is_for_one_process_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pages["/x"] = b"1"
    real = data._take_files

    def nested(*args: Any) -> list[str]:
        with pytest.raises(DataError, match="another process is downloading to data/x"):
            downloaded(f"{site.url}/x")
        return real(*args)

    monkeypatch.setattr(data, "_take_files", nested)
    assert files(downloaded(f"{site.url}/x")[0]) == {"x": b"1"}


@pytest.mark.parametrize("function", ["_move", "write_json"])
def test_a_disk_that_fails_is_one_message(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    site.pages["/x"] = b"1"

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(data, function, fail)
    assert cli.main(["data", f"{site.url}/x"]) == 1
    assert "No space left on device; run it again: complete files" in capsys.readouterr().err


def test_no_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.pages |= {"/x.zip": zipped(x=NOISE), "/x.bin": NOISE}
    usage = SimpleNamespace(free=2_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"x.zip needs 6.0 MB, but .* has only 2.0 MB free"):
        downloaded(f"{site.url}/x.zip")
    with pytest.raises(DataError, match=r"x.bin needs 3.0 MB, but .* has only 2.0 MB free"):
        downloaded(f"{site.url}/x.bin")
    assert not Path("data/x").exists()
    assert not site.sent


def test_nothing_is_overwritten(site: Site) -> None:
    site.pages["/x.zip"] = zipped(**{"a.txt": b"new", "same.txt": b"same", "b/c.txt": b"c"})
    Path("data/x").mkdir(parents=True)
    Path("data/x/a.txt").write_bytes(b"mine")
    Path("data/x/same.txt").write_bytes(b"same")
    with pytest.raises(DataError, match=r"other files with these names: a.txt. Nothing was over"):
        downloaded(f"{site.url}/x.zip")
    assert files(Path("data/x")) == {"a.txt": b"mine", "same.txt": b"same"}
    Path("data/x/a.txt").unlink()
    sent = site.sent
    downloaded(f"{site.url}/x.zip")
    assert files(Path("data/x")) == {"a.txt": b"new", "same.txt": b"same", "b/c.txt": b"c"}
    assert site.sent == sent  # the archive was not downloaded again


def test_archives_are_unpacked_unless_they_are_to_stay(site: Site) -> None:
    site.pages["/x.zip"] = zipped(a=b"1")
    assert files(downloaded(f"{site.url}/x.zip")[0]) == {"a": b"1"}
    downloaded(f"{site.url}/x.zip", unpack=False)  # a different download
    assert set(files(Path("data/x"))) == {"a", "x.zip"}
    assert list(files(downloaded(f"{site.url}/x.zip", "kept", unpack=False)[0])) == ["x.zip"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.tar.bz2", "a.tar.xz"])
def test_a_broken_archive_is_downloaded_again(site: Site, name: str) -> None:
    whole = io.BytesIO()
    if name == "a.zip":
        whole.write(zipped(**{"a.txt": NOISE[:50_000]}))
    else:
        with tarfile.open(fileobj=whole, mode=f"w:{name.rpartition('.')[2]}") as file:
            info = tarfile.TarInfo("a.txt")
            info.size = 50_000
            file.addfile(info, io.BytesIO(NOISE[:50_000]))
    good = whole.getvalue()
    middle = len(good) // 2
    for bad in (good[:middle], good[:middle] + bytes(99) + good[middle + 99 :], b"an error page"):
        site.pages[f"/{name}"] = bad
        with pytest.raises(DataError, match="is broken or not an archive"):
            downloaded(f"{site.url}/{name}", "to")
    site.pages[f"/{name}"] = good  # with the same size and version according to the server
    folder, _ = downloaded(f"{site.url}/{name}", "to")
    assert files(folder) == {"a.txt": NOISE[:50_000]}


def test_parts_of_a_download_there_do_not_come_along() -> None:
    put("memory://bucket/set/a.txt", b"a")
    put("memory://bucket/set/.tpunb-data/record.json", b"{}")
    folder, _ = downloaded("memory://bucket/set", "to")
    assert files(folder) == {"a.txt": b"a"}
    assert (folder / ".tpunb-data/record.json").read_bytes() != b"{}"


def test_an_archive_has_no_files_of_tpunb(site: Site) -> None:
    site.pages["/x.zip"] = zipped(**{"a/.TPUNB-data/record.json": b"{}"})
    with pytest.raises(DataError, match="is where tpunb keeps its own files"):
        downloaded(f"{site.url}/x.zip")


def test_what_web_servers_refuse(site: Site) -> None:
    with pytest.raises(DataError, match=r"/none: ClientResponseError: 404, .*Not Found"):
        downloaded(f"{site.url}/none?token=5ec2e7")
    site.pages["/x"] = b"1"
    site.statuses = [403] * 2  # to HEAD and GET
    with pytest.raises(DataError, match=r"/x: ClientResponseError: 403, .*Forbidden"):
        downloaded(f"{site.url}/x")
    assert not Path("data").exists() or not os.listdir("data")
    with pytest.raises(DataError, match=r"127\.0\.0\.1:9/x: ClientConnector"):
        downloaded("http://user:5ec2e7@127.0.0.1:9/x")


@pytest.mark.parametrize("scheme", ["memory://bucket", "file://{}/bucket"])
def test_a_folder_of_a_bucket(scheme: str, tmp_path: Path) -> None:
    root = scheme.format(tmp_path)
    (tmp_path / "bucket/set/b").mkdir(parents=True)
    content = {"a.bin": NOISE, "b/c.txt": b"c", "b/d.zip": zipped(x=b"1"), "empty": b""}
    for name, stored in content.items():
        put(f"{root}/set/{name}", stored)
    there, said = downloaded(f"{root}/set")
    assert there == Path("data/set")
    assert files(there) == content  # the archive in it stays packed
    assert said.startswith(f"{root}/set: 4 files, 3.0 MB in data/set")
    assert "nothing was downloaded" in downloaded(f"{root}/set")[1]
    assert files(downloaded(f"{root}/set/b/c.txt", "one")[0]) == {"c.txt": b"c"}
    assert files(downloaded(f"{root}/set/b/d.zip", "two")[0]) == {"x": b"1"}


def test_a_name_that_leads_out_of_the_folder() -> None:
    put("memory://bucket/set/ok", b"1")
    fsspec.filesystem("memory").store["/bucket/set/../evil"] = fsspec.filesystem("memory").store[
        "/bucket/set/ok"
    ]
    with pytest.raises(DataError, match="leads out of the folder"):
        downloaded("memory://bucket/set")
    assert not list(Path().rglob("evil"))


@pytest.mark.parametrize("path", ["/a%2F..%2F..%2Fevil", "/%2E%2E", "/x/.."])
def test_a_url_that_leads_out_of_the_folder(site: Site, path: str) -> None:
    site.pages[path] = b"1"
    with pytest.raises(DataError, match=r"leads out of the folder|ClientResponseError: 404"):
        downloaded(site.url + path, "mine")
    assert not list(Path().rglob("evil"))


def test_what_is_not_there_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"memory://bucket/none: it does not exist"):
        downloaded("memory://bucket/none")
    with pytest.raises(DataError, match=r"nosuch://bucket/x: Protocol not known"):
        downloaded("nosuch://bucket/x")
    with pytest.raises(DataError, match=r"invalid source 'competitions/titanic': expected a URL"):
        downloaded("competitions/titanic")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DataError, match=r"gs://bucket/x: .*install gcsfs"):
        downloaded("gs://bucket/x")
    assert not Path("data").exists() or not os.listdir("data")


@pytest.mark.parametrize(
    "error",
    [
        OSError("Forbidden: https://storage…/o/x"),
        type("DefaultCredentialsError", (Exception,), {})("Your default credentials were not fo"),
        PermissionError("Anonymous caller does not have storage.objects.get"),
    ],
)
def test_what_buckets_refuse(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "find", refuse)
    with pytest.raises(DataError, match=f"memory://bucket/x: {type(error).__name__}: {error}"):
        downloaded("memory://bucket/x")


def test_a_file_where_the_folder_should_be(site: Site) -> None:
    Path("mine").write_text("x")
    with pytest.raises(DataError, match=r"cannot create mine/.*: Not a directory"):
        downloaded(f"{site.url}/x", "mine")


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


def sent(folder: str, url: str) -> str:
    said: list[str] = []
    data.upload(Path(folder), url, said.append)
    return "\n".join(said)


def test_a_folder_is_sent_and_comes_back(site: Site) -> None:
    site.pages["/x.zip"] = zipped(**{"a.bin": NOISE[:900_000], "b/c.txt": b"c", "empty": b""})
    there, _ = downloaded(f"{site.url}/x.zip", "mine")
    url = "memory://bucket/results"
    assert sent("mine", url) == f"{url}: 3 files, 900 kB uploaded"
    assert files(downloaded(url, "back")[0]) == files(there)
    assert sent("mine", url) == f"{url}: 0 files, 0 B uploaded; 3 of 3 files were already there"
    (there / "new").write_bytes(b"n")
    assert (
        sent("mine", url + "/") == f"{url}/: 1 file, 1 B uploaded; 3 of 4 files were already there"
    )
    for url in ("there/results", f"local://{Path('here').absolute()}"):  # with folders to make
        assert ": 4 files, 900 kB uploaded" in sent("mine", url)
    assert files(Path("there/results")) == files(Path("here")) == files(there)


def test_nothing_is_overwritten_there() -> None:
    Path("mine").mkdir()
    Path("mine/a").write_bytes(b"new")
    Path("mine/b").write_bytes(b"b")
    put("memory://bucket/results/a", b"old")
    with pytest.raises(
        DataError, match=r"has other files with these names: a. Nothing was uploaded"
    ):
        sent("mine", "memory://bucket/results")
    assert set(fsspec.filesystem("memory").store) == {"/bucket/results/a"}
    with pytest.raises(DataError, match=r"results/a is a file: name a folder"):
        sent("mine", "memory://bucket/results/a")


def test_what_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none is empty or does not exist"):
        sent("none", "memory://bucket/x")
    Path("empty").mkdir()
    with pytest.raises(DataError, match="empty is empty"):
        sent("empty", "memory://bucket/x")
    Path("empty/x").touch()
    with pytest.raises(DataError, match="cannot upload to http://x"):
        sent("empty", "http://x/y")
    sent("empty/x", "memory://bucket/one")
    assert set(fsspec.filesystem("memory").store) == {"/bucket/one/x"}
