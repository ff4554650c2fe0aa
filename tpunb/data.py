"""`%tpu_data` and `tpunb data`: download data, or upload results.

Kaggle's datasets, models and competitions are downloaded with kagglehub: DIR becomes a link to
kagglehub's copy, in its cache or in the mounted inputs of a Kaggle notebook. Everything else that
has a URL is read through fsspec, into

    DIR/…                          the files
    DIR/.tpunb-data/record.json    the sizes of the downloaded files, by source
    DIR/.tpunb-data/*.part         incomplete files, named for the file and its version
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import filecmp
import hashlib
import json
import lzma
import os
import re
import shutil
import stat
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from tpunb.utils import text
from tpunb.utils.errors import DataError, MissingPackageError
from tpunb.utils.files import write_json
from tpunb.utils.options import argument, flag, option

HELP = "download data, or upload results; nothing is transferred twice or overwritten"
WORK = ".tpunb-data"
DEFAULT = Path("data")
"""Folder that holds one folder for each source if --to is not given."""
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PARALLEL = 8
"""Files of a folder that are copied at the same time: each waits for its first byte."""
CHUNK = 8 << 20
"""Bytes of a read: most of fsspec's file systems send one request for each read."""
TRIES = 5
"""Attempts in a row that may fail, by a lost connection, without any progress."""
PAUSE = 1.0
"""Seconds before the second attempt; each later pause is twice as long."""
READ_TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as lost."""
_WEB = ("http://", "https://")
_BUSY = (429, 500, 502, 503, 504)  # HTTP status codes of temporary errors
_VERSION = "generation ETag etag md5Hash LastModified Last-Modified mtime created".split()
"""Fields of fsspec's file infos that change with the content."""
_NETWORK = ("aiohttp", "asyncio", "botocore", "requests", "urllib3")
"""Libraries whose errors for a lost connection are not OSErrors."""

Say = Callable[[str], None]
"""Shows a line to the user."""
Update = Callable[[int], object]
"""Adds a number of bytes to the progress."""


@dataclass(frozen=True)
class DataOptions:
    """Options of `%tpu_data` and `tpunb data`."""

    source: str | None = argument(
        "SOURCE",
        help="kaggle://competitions/NAME, kaggle://datasets/OWNER/NAME, "
        "kaggle://models/OWNER/MODEL/FRAMEWORK/VARIATION or the address of its page, gs://…, "
        "https://… or another URL that fsspec supports; with --upload: a local folder",
    )
    to: str | None = option(
        "--to", metavar="DIR", help="the folder to download to (default: data/NAME)"
    )
    upload: str | None = option(
        "--upload",
        metavar="URL",
        help="upload the folder SOURCE to this URL, e.g. gs://BUCKET/NAME",
    )
    no_unpack: bool = flag("--no-unpack", help="do not unpack an archive")


def run(options: DataOptions, say: Say) -> None:
    """Download or upload. Raises DataError or MissingPackageError."""
    if options.source is None:
        raise DataError(
            "SOURCE is missing: name one, such as kaggle://competitions/titanic (--help lists the "
            "forms)"
        )
    if options.upload and (options.to or options.no_unpack):
        raise DataError(
            "--upload cannot be combined with --to or --no-unpack, which are for downloads"
        )
    try:
        if options.upload:
            upload(Path(options.source).expanduser(), options.upload, say)
        else:
            to = Path(options.to).expanduser() if options.to else None
            download(options.source, to, say, unpack=not options.no_unpack)
    except OSError as error:
        raise DataError(
            f"{error.strerror or error}; run it again to resume: complete parts of the download "
            "are kept"
        ) from error


def download(source: str, to: Path | None, say: Say, *, unpack: bool = True) -> Path:
    """Download a source into the folder `to` (default: data/NAME) and return the folder.

    Raises DataError or MissingPackageError.
    """
    if (kaggle := parse_kaggle(source)) is not None:
        return _link_kaggle(kaggle, to or DEFAULT / kaggle.name, say, unpack=unpack)
    if "://" not in source:
        raise DataError(
            f"invalid source {source!r}: expected a URL such as kaggle://competitions/NAME, "
            "gs://BUCKET/FOLDER or https://…; to upload a local folder, add --upload URL"
        )
    name = public_url(source)
    key = f"{name}?{_digest(source)}" if "?" in source else name
    key += "" if unpack else " --no-unpack"
    folder = to or DEFAULT / _folder_name(name)
    work = folder / WORK
    with _locked(work):
        record: dict[str, dict[str, int]] = {}  # the sizes of each source's files
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((work / "record.json").read_bytes())
        sizes = record.get(key)
        if sizes is not None and _sizes(folder, sizes) == sizes:
            say(f"{name} is already in {folder} ({_count(sizes)}); nothing was downloaded")
            return folder
        remote = _retry(lambda: _list_remote(*_file_system(source), name), name)
        first, file = next(iter(remote.items()))
        # Archives are recognised by name, because .npz and .docx files are zips too. Those in a
        # bucket's folder stay packed.
        if file.url == name and unpack and first.lower().endswith(ARCHIVES):
            names = _fetch_archive(file, first, folder, work)
        else:
            names = _fetch_files(remote, folder, work)
        record[key] = _sizes(folder, names)
        write_json(work / "record.json", record)
    say(f"{name}: {_count(record[key])} in {folder}")
    return folder


def public_url(url: str) -> str:
    """Return a URL without the parts that may be secret: user, password, signed query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


# --- The folder on this machine ---


def _folder_name(url: str) -> str:
    parts = urlsplit(url)
    name = parts.path.rstrip("/").rpartition("/")[2] or parts.netloc
    suffix = next((s for s in ARCHIVES if name.endswith(s)), Path(name).suffix)
    return name.removesuffix(suffix).strip(".") or "data"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Create the folder and lock it for this process; remove it again if it is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot create {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()
                folder.parent.rmdir()
    except BlockingIOError:
        raise DataError(f"another process is downloading to {folder}: wait for it") from None
    finally:
        os.close(lock)


def _sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    return {n: (folder / n).stat().st_size for n in names if (folder / n).is_file()}


def _count(sizes: Mapping[str, int]) -> str:
    names = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
    return f"{names}, {text.size(sum(sizes.values()))}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:12]


def _need_room(folder: Path, count: int, what: str) -> None:
    """Raise DataError unless the disk of `folder` has room for `count` more bytes."""
    free = shutil.disk_usage(folder).free
    if count > free:
        raise DataError(
            f"{what} needs {text.size(count)}, but the disk of {folder} has only {text.size(free)} "
            "free: free some space, or name a folder on a larger disk with --to"
        )


def _refuse_taken(folder: Path, names: Iterable[str]) -> None:
    """Raise DataError if the path of one of the files is taken."""

    def is_taken(path: Path) -> bool:
        return os.path.lexists(path) or any(map(Path.is_file, path.parents))

    taken = [name for name in names if is_taken(folder / name)]
    fix = "overwritten: move them away, or name another folder with --to"
    _refuse_overwriting(str(folder), taken, fix)


def _refuse_overwriting(folder: str, names: list[str], fix: str) -> None:
    if names:
        first = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise DataError(f"{folder} has other files with these names: {first}. Nothing was {fix}")


def _in_parallel(action: Callable[[str, Update], None], names: list[str], total: int) -> None:
    """Call `action` for each name, several at a time, with a progress bar of `total` bytes.

    The first failure, or Ctrl-C, ends the others at their next update.
    """
    stopped = threading.Event()
    what = names[0] if len(names) == 1 else f"{len(names)} files"
    with _progress_bar(what, total) as bar, ThreadPoolExecutor(PARALLEL) as pool:

        def update(count: int) -> None:
            if stopped.is_set():
                raise DataError("stopped")
            bar.update(count)

        try:
            list(pool.map(lambda name: action(name, update), names))
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _progress_bar(what: str, total: int | None) -> Any:
    """Return a progress bar on standard output: a saved notebook would not contain a widget."""
    from tqdm.std import tqdm

    watched = sys.stdout.isatty() or "ipykernel" in sys.modules
    options: Any = {"unit": "B", "unit_scale": True, "delay": 0.5, "leave": False}
    return tqdm(desc=what, total=total, file=sys.stdout, disable=not watched, **options)


# --- Files behind a URL ---


@dataclass(frozen=True)
class RemoteFile:
    """A file in one of fsspec's file systems."""

    system: Any
    path: str
    url: str
    """Its name in messages."""
    info: Mapping[str, Any]

    @property
    def size(self) -> int | None:
        """Bytes; None if the server does not report them."""
        size: int | None = self.info.get("size")
        return size

    @property
    def version(self) -> str:
        """A string that changes with the content; '' if the server has none but a weak ETag."""
        values = (str(self.info.get(field) or "") for field in _VERSION)
        return next((v for v in values if v and not v.startswith("W/")), "")

    @property
    def checksum(self) -> str | None:
        """The md5 of Google's store and others; ETags may depend on more than the content."""
        md5 = self.info.get("md5Hash") or self.info.get("Content-MD5")
        return md5 if md5 and len(md5) == 24 else None  # base64; some stores use other forms

    def refreshed(self) -> RemoteFile:
        """Return this file with the server's current information."""
        with _explained(self.url):
            self.system.invalidate_cache()
            return replace(self, info=self.system.info(self.path))

    def has_content_of(self, path: Path) -> bool:
        """True if a local file has the same size, and the store's checksum if there is one."""
        if not path.is_file() or self.size not in (None, path.stat().st_size):
            return False
        return self.checksum is None or self.checksum == _md5(path)


def _md5(path: Path) -> str:
    checksum = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            checksum.update(chunk)
    return base64.b64encode(checksum.digest()).decode()


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    from fsspec.core import split_protocol, url_to_fs

    is_local = split_protocol(url)[0] in (None, "file", "local")
    options: dict[str, Any] = {"auto_mkdir": True} if is_local else {}
    if url.startswith(_WEB):
        import aiohttp

        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=READ_TIMEOUT, sock_read=READ_TIMEOUT
        )
        # trust_env: use proxies. identity: compressed responses have no ranges.
        options["client_kwargs"] = {"trust_env": True, "timeout": limits}
        options["headers"] = {"Accept-Encoding": "identity"}
    try:
        system, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # «Please install gcsfs to access Google Storage»
        raise DataError(f"{public_url(url)}: {error}") from None
    system.invalidate_cache()
    return system, path


def _list_remote(system: Any, path: str, url: str) -> dict[str, RemoteFile]:
    """Return the file at a path, or all files of the folder, keyed by their names in DIR."""
    web, root = url.startswith(_WEB), path.rstrip("/")
    alone = root.rpartition("/")[2]
    if web:
        alone = unquote(urlsplit(alone).path) or "index"
        _check_name(url, alone, single=True)
    with _explained(url):
        infos = {path: system.info(path)} if web else system.find(path, detail=True)
        if not infos:
            raise FileNotFoundError(path)
        if set(infos) == {path}:  # fsspec's own `find` returns no info for a single file
            return {alone: RemoteFile(system, path, url, infos[path] or system.info(path))}
    files = {}
    for place, info in sorted(infos.items()):
        name = place.removeprefix(f"{root}/")
        # Skip empty objects that stand for folders, and the work files of a download to there.
        if not place.endswith("/") and WORK not in PurePosixPath(name).parts:
            _check_name(url, name)
            files[name] = RemoteFile(system, place, f"{url.rstrip('/')}/{name}", info)
    return files


def _check_name(source: str, name: str, *, single: bool = False, special: bool = False) -> None:
    """Raise DataError for a name that leads out of the folder, or a link or device (`special`)."""
    path = PurePosixPath(name)
    problem = "is a link or a device" if special else ""
    if any(part.casefold() == WORK for part in path.parts):
        problem = "is where tpunb keeps its own files"
    if path.is_absolute() or ".." in path.parts or "\\" in name or (single and "/" in name):
        problem = "leads out of the folder"
    if problem:
        raise DataError(f"{source}: {name!r} {problem}, so {source} is not used at all")


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Convert errors of file systems to DataError, or to ConnectionError if a retry may help."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # fsspec's http raises FileNotFoundError for any status
        status = getattr(cause, "status", None)
        message = f"{type(cause).__name__}: {cause}"
        message = re.sub(r"(https?://[^\s?]+)\?[^\s'\"]+", r"\1", message)  # signed, so secret
        lost = isinstance(cause, (ConnectionError, TimeoutError)) or status in _BUSY
        if lost or (status is None and type(cause).__module__.partition(".")[0] in _NETWORK):
            raise ConnectionError(message) from None
        if isinstance(cause, FileNotFoundError):
            message = "it does not exist, or you are not allowed to list it"
        elif isinstance(error, OSError) and error.errno:  # from this machine's disk
            raise
        raise DataError(f"{url}: {message}") from None


def _retry(action: Callable[[], Any], name: str, progress: Callable[[], float] = float) -> Any:
    """Repeat `action` until it succeeds, or fails TRIES times in a row without `progress`."""
    failures = 0
    while True:
        before = progress()
        try:
            return action()
        except (ConnectionError, TimeoutError) as error:
            failures = 1 if progress() > before else failures + 1
            if failures >= TRIES:
                internet = ": is this machine on the internet?"
                if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
                    internet = ": turn Internet on (Settings), or add the data with «Add Input»."
                raise DataError(
                    f"{name}: no connection in {TRIES} attempts ({error}){internet} "
                    "Complete parts of the download are kept: run it again to resume"
                ) from None
            time.sleep(PAUSE * 2 ** (failures - 1))


def fetch(remote: RemoteFile, work: Path, update: Update) -> Path:
    """Download a file into the folder `work`, resuming what an earlier call has left there.

    Raises DataError. An incomplete file stays for the next call, unless its content is wrong.
    """
    name, part = _digest(remote.url), work

    def size() -> int:
        return part.stat().st_size if part.is_file() else 0

    def attempt() -> None:
        nonlocal part
        current = remote.refreshed() if size() else remote
        part = work / f"{name}-{_digest(current.version)}.part"
        for other in work.glob(f"{name}-*"):
            if other != part or not current.version:
                other.unlink()  # part of another version, or of an unknown one
        begin = size()
        with _explained(remote.url):
            try:
                _copy(current, part, begin, update, block_size=CHUNK, cache_type="none")
            except ValueError:  # raised by fsspec if the server does not support ranges
                _copy(current, part, 0, update, block_size=0)
        if current.size is not None and size() < current.size:
            raise ConnectionError(f"it ended after {size()} of {current.size} bytes")
        # Without a checksum, ranges of two versions of a changed file would go unnoticed.
        changed = (begin or size() > CHUNK) and not current.checksum
        changed = changed and current.refreshed().version != current.version
        if changed or not current.has_content_of(part):
            part.unlink()
            raise DataError(
                f"{remote.url}: the downloaded file does not have the expected size or checksum, "
                "and was removed: try again"
            )

    _retry(attempt, remote.url, progress=size)
    return part


def _copy(remote: RemoteFile, part: Path, begin: int, update: Update, **options: Any) -> None:
    """Append the bytes from `begin` to the end to `part`."""
    with remote.system.open(remote.path, "rb", **options) as file, open(part, "ab") as out:
        file.seek(begin)
        update(begin)
        out.truncate(begin)
        while begin != remote.size and (chunk := file.read(CHUNK)):
            begin += out.write(chunk)
            out.flush()
            update(len(chunk))


def _fetch_files(remote: dict[str, RemoteFile], folder: Path, work: Path) -> list[str]:
    """Download the files that are missing in `folder`, and return the names of all."""
    missing = [name for name in remote if not remote[name].has_content_of(folder / name)]
    _refuse_taken(folder, missing)
    total = sum(remote[name].size or 0 for name in missing)
    _need_room(work, total, missing[0] if len(missing) == 1 else "the download")

    def fetch_one(name: str, update: Update) -> None:
        part = fetch(remote[name], work, update)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        part.rename(folder / name)

    _in_parallel(fetch_one, missing, total)
    return list(remote)


def _fetch_archive(remote: RemoteFile, name: str, folder: Path, work: Path) -> list[str]:
    """Download an archive and unpack it into `folder`, unless that would overwrite other files."""
    # The size of the content is unknown, but hardly smaller than the archive.
    _need_room(work, 2 * (remote.size or 0), name)
    with _progress_bar(name, remote.size) as bar:
        part = fetch(remote, work, bar.update)
    with tempfile.TemporaryDirectory(dir=work) as fresh:
        unpack_archive(part, name, Path(fresh))
        paths = {str(p.relative_to(fresh)): p for p in sorted(Path(fresh).rglob("*"))}
        files = {n: path for n, path in paths.items() if path.is_file()}
        _refuse_taken(folder, [n for n in files if not _is_same(files[n], folder / n)])
        for n in paths.keys() - files.keys():
            (folder / n).mkdir(parents=True, exist_ok=True)
        for n, path in files.items():
            path.replace(folder / n)
    part.unlink()
    return list(files)


def _is_same(path: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(path, other, shallow=False)


# --- Archives ---

_BROKEN = (zipfile.BadZipFile, tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError)


def unpack_archive(archive: Path, name: str, folder: Path) -> None:
    """Unpack an archive into an empty folder; `name` decides its format.

    Raises DataError if it is broken (then it is removed), does not fit on the disk, or has a member
    that is a link or a device or would be written outside of the folder; the folder's content is
    then undefined.
    """
    try:
        (_unpack_zip if name.lower().endswith(".zip") else _unpack_tar)(archive, name, folder)
    except _BROKEN as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk; those of gzip and bz2 have no number
        archive.unlink()
        raise DataError(
            f"{name} is broken or not an archive ({error}): run it again to download it again; "
            "--no-unpack keeps it as it is"
        ) from None
    except RuntimeError as error:  # raised by zipfile for a member with a password
        raise DataError(
            f"{name} cannot be unpacked ({error}); --no-unpack keeps it as it is"
        ) from None


def _unpack_zip(archive: Path, name: str, folder: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            _check_name(name, info.filename, special=stat.S_ISLNK(info.external_attr >> 16))
        _need_room(folder, sum(i.file_size for i in file.infolist()), f"unpacking {name}")
        file.extractall(folder)


def _unpack_tar(archive: Path, name: str, folder: Path) -> None:
    with tarfile.open(archive) as file:

        def checked() -> Iterator[tarfile.TarInfo]:
            for member in file:
                _check_name(name, member.name, special=not (member.isreg() or member.isdir()))
                # Checked for each member: reading all sizes first would unpack the archive.
                _need_room(folder, member.size, f"unpacking {name}")
                yield member

        # Python before 3.10.12 and 3.11.4 has no filters.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder, checked())
        # The archive's checksum follows the last member: read up to it.
        while file.fileobj.read(CHUNK):
            pass


# --- Uploads ---


def upload(folder: Path, url: str, say: Say) -> None:
    """Upload a file, or the files of a folder, to a URL, except those that are already there.

    Raises DataError, before anything is sent, if another file has one of the names there.
    """
    if url.startswith(_WEB):
        raise DataError(f"cannot upload to {url}: name a bucket, as in gs://NAME/FOLDER")
    local = {folder.name: folder}
    if not folder.is_file():
        paths = (p for p in sorted(folder.rglob("*")) if p.is_file() and WORK not in p.parts)
        local = {str(path.relative_to(folder)): path for path in paths}
    if not local:
        raise DataError(f"{folder} is empty or does not exist: there is nothing to upload")
    name = public_url(url)
    system, root = _file_system(url)
    with _explained(name):
        remote = _list_remote(system, root, name) if system.isdir(root) else {}
        if not remote and system.isfile(root):
            raise DataError(f"{name} is a file: name a folder as the URL of --upload")
        same = {n for n in local.keys() & remote.keys() if _is_uploaded(local[n], remote[n])}
    others = sorted(local.keys() & remote.keys() - same)
    _refuse_overwriting(name, others, "uploaded: name another folder")
    sizes = {n: path.stat().st_size for n, path in local.items() if n not in same}

    def send(relative: str, update: Update) -> None:
        path, place = local[relative], f"{root.rstrip('/')}/{relative}"
        file = RemoteFile(system, place, f"{name.rstrip('/')}/{relative}", {})
        update(0)
        with _explained(file.url):
            system.put_file(str(path), place)
        if not file.refreshed().has_content_of(path):
            raise DataError(
                f"{file.url} does not have the content that was uploaded: upload it again"
            )
        update(path.stat().st_size)

    _in_parallel(send, list(sizes), sum(sizes.values()))
    known = f"; {len(same)} of {len(local)} files were already there" if same else ""
    say(f"{name}: {_count(sizes)} uploaded{known}")


def _is_uploaded(path: Path, remote: RemoteFile) -> bool:
    if remote.checksum or not remote.has_content_of(path):
        return remote.has_content_of(path)
    with remote.system.open(remote.path, "rb") as there, open(path, "rb") as here:
        return all(here.read(len(chunk)) == chunk for chunk in iter(lambda: there.read(CHUNK), b""))


# --- Kaggle ---

_SLUG = r"[A-Za-z0-9][\w.-]*"
_KAGGLE = re.compile(
    r"(?P<page>https?://(www\.)?kaggle\.com/)?"
    rf"((c|competitions)/(?P<competition>{_SLUG})"
    rf"|datasets/(?P<dataset>{_SLUG}/{_SLUG}(/versions/\d+)?)"
    rf"|models/(?P<model>{_SLUG}(/{_SLUG}){{3}}(/\d+)?))"
    r"(?P<file>/[^?#]+)?([?#].*)?"
)
_FORMS = """
  kaggle://competitions/NAME[/FILE]
  kaggle://datasets/OWNER/NAME[/versions/N][/FILE]
  kaggle://models/OWNER/MODEL/FRAMEWORK/VARIATION[/VERSION]
or the address of its page on kaggle.com"""


@dataclass(frozen=True)
class KaggleSource:
    """A competition, dataset or model of Kaggle."""

    kind: str
    """'competitions', 'datasets' or 'models'."""
    handle: str
    """kagglehub's: NAME, OWNER/NAME[/versions/N] or OWNER/MODEL/FRAMEWORK/VARIATION[/N]."""
    file: str | None = None
    """The only file to download; None: all files."""

    @property
    def url(self) -> str:
        """The source as the user writes it."""
        return f"kaggle://{self.kind}/{self.handle}" + (f"/{self.file}" if self.file else "")

    @property
    def name(self) -> str:
        """The name of the folder to download to."""
        return self.handle.split("/")[0 if self.kind == "competitions" else 1]


def parse_kaggle(source: str) -> KaggleSource | None:
    """Parse a source; None if it is not Kaggle's. Raises DataError for a wrong form."""
    if not re.match(r"kaggle://|https?://(www\.)?kaggle\.com/", source):
        return None
    match = _KAGGLE.fullmatch(source.removeprefix("kaggle://").rstrip("/"))
    if match is None:
        raise DataError(f"{source} does not have one of the forms{_FORMS}")
    # '/data', '/overview', … at the end of a page's address are its tabs.
    file = (match["file"] or "").strip("/") if not match["page"] else ""
    if file and (match["model"] or ".." in file or file.startswith("versions/")):
        raise DataError(f"{source} does not have one of the forms{_FORMS}")
    kind = next(kind for kind in ("competition", "dataset", "model") if match[kind])
    return KaggleSource(f"{kind}s", match[kind], file or None)


def _link_kaggle(source: KaggleSource, folder: Path, say: Say, *, unpack: bool) -> Path:
    """Make `folder`, or the file in it, a link to kagglehub's copy of the source."""
    if not unpack:
        raise DataError(
            f"{source.url}: kagglehub always unpacks archives itself; remove --no-unpack"
        )
    link = folder / source.file.rpartition("/")[2] if source.file else folder
    target = os.readlink(link) if link.is_symlink() else ""
    if link.exists() and f"/{source.kind}/{source.handle}/" in f"{target}/":
        say(f"{source.url} is already in {folder}; nothing was downloaded")
        return folder
    # Only kagglehub knows where a Kaggle notebook mounts the source.
    path = "" if link.exists() and not target else _ask_kagglehub(source)
    if link.exists() and not (path and link.samefile(path)):
        raise DataError(
            f"{link} already exists and does not come from {source.url}: move it away, or name "
            "another folder with --to"
        )
    link.unlink(missing_ok=True)  # its target may have been removed from the cache
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(Path(path).absolute())
    say(f"{source.url} is in {link}, a link to {path}")
    return folder


def _ask_kagglehub(source: KaggleSource) -> str:
    """Return the path of kagglehub's copy: mounted, or downloaded now or earlier."""
    try:
        import kagglehub
        import requests
        from kagglehub import exceptions
        from kagglesdk.kaggle_env import get_endpoint, get_env
    except ImportError:
        install = "`pip install 'tpunb[kaggle]'`"
        raise MissingPackageError("kagglehub", "data from Kaggle", install) from None
    get = getattr(kagglehub, f"{source.kind.removesuffix('s')}_download")

    def attempt() -> str:
        try:
            if "KAGGLE_DATA_PROXY_URL" not in os.environ:  # set in Kaggle notebooks
                # kagglehub's client would wait forever for a server that does not answer.
                requests.head(get_endpoint(get_env()), timeout=READ_TIMEOUT)
            return str(get(source.handle, path=source.file))
        except (requests.HTTPError, exceptions.UnauthenticatedError) as error:
            message = " ".join(str(error).split())
            raise DataError(
                f"{source.url}: {message} (tokens: https://www.kaggle.com/settings)"
            ) from None
        except requests.RequestException as error:
            raise ConnectionError(type(error).__name__) from None
        except (ValueError, exceptions.BackendError, exceptions.DataCorruptionError) as error:
            raise DataError(f"{source.url}: {' '.join(str(error).split())}") from None

    cache = Path(os.environ.get("KAGGLEHUB_CACHE") or Path.home() / ".cache/kagglehub")
    with _locked(cache):
        # kagglehub does not report its progress: an attempt of minutes counts as progress.
        path: str = _retry(attempt, source.url, progress=lambda: time.monotonic() // 60)
    return path
