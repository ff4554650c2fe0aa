"""`%tpu_data` and `tpunb data`: download data, or upload results.

Kaggle's datasets, models and competitions are downloaded with kagglehub: DIR becomes a link to
kagglehub's copy, in its cache or in the mounted inputs of a Kaggle notebook. Everything else that
has a URL is read through fsspec, into DIR; DIR/.tpunb-data has what is not complete yet, and
record.json: the sizes of the downloaded files, by source.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from lzma import LZMAError
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
READ_TIMEOUT = 30.0
"""Seconds without a byte after which a web server counts as lost."""
_WEB = ("http://", "https://")
_KEPT = "overwritten: move them away, or name another folder with --to"

Say = Callable[[str], None]
"""Shows a line to the user."""


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
            f"{error.strerror or error}; run it again: complete files are kept"
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
    with _locked(folder / WORK) as work:
        record: dict[str, dict[str, int]] = {}  # the sizes of each source's files
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((work / "record.json").read_bytes())
        if (sizes := record.get(key)) is not None and _sizes(folder, sizes) == sizes:
            say(f"{name} is already in {folder} ({_count(sizes)}); nothing was downloaded")
            return folder
        with _explained(name):
            remote = Remote(source, name)
        # Archives are recognised by name, because .npz and .docx files are zips too. Those in a
        # bucket's folder stay packed.
        packed = unpack and remote.alone.lower().endswith(ARCHIVES)
        names = (_take_archive if packed else _take_files)(remote, folder, work)
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
def _locked(folder: Path) -> Iterator[Path]:
    """Create the folder and lock it for this process; remove it again if it is empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"cannot create {folder}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
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


def _refuse_overwriting(folder: object, names: Iterable[str], fix: str) -> None:
    if taken := sorted(names):
        first = ", ".join(taken[:3]) + (", …" if len(taken) > 3 else "")
        raise DataError(f"{folder} has other files with these names: {first}. Nothing was {fix}")


def _move(files: Mapping[str, Path], folder: Path) -> None:
    """Move files to their names in a folder. Raises DataError, before that, if one is taken."""
    taken = [n for n in files if any(map(Path.is_file, (folder / n).parents))]
    taken += [
        n
        for n, path in files.items()
        if os.path.lexists(folder / n)
        and not ((folder / n).is_file() and filecmp.cmp(path, folder / n, shallow=False))
    ]
    _refuse_overwriting(folder, taken, _KEPT)
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.replace(folder / name)


def _check_name(source: str, name: str) -> None:
    """Raise DataError for a name that leads out of the folder, or to tpunb's own files."""
    path, problem = PurePosixPath(name), ""
    if any(part.casefold() == WORK for part in path.parts):
        problem = "is where tpunb keeps its own files"
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        problem = "leads out of the folder"
    if problem:
        raise DataError(f"{source}: {name!r} {problem}, so {source} is not used at all")


# --- What is behind a URL ---


class Remote:
    """A file, or all files of a folder, in one of fsspec's file systems."""

    def __init__(self, url: str, name: str) -> None:
        """`name`: the URL for messages."""
        self.name = name
        self.system, path = _file_system(url)
        found = {path: self.system.info(path)} if url.startswith(_WEB) else {}
        found = found or self.system.find(path, detail=True)
        if not found:
            raise FileNotFoundError(path)
        self.alone = ""
        """The name of the file, if it is a single one."""
        if [*found] == [path]:  # fsspec's own `find` returns no info for a single file
            self.alone = unquote(urlsplit(path.rstrip("/").rpartition("/")[2]).path) or "index"
            _check_name(name, self.alone.replace("/", "\\"))
            self.files = {self.alone: (path, (found[path] or self.system.info(path)))}
            return
        root = path.rstrip("/")
        relative = {place.removeprefix(f"{root}/"): place for place in sorted(found)}
        # Empty objects stand for folders; a download to there has left its own files.
        self.files = {
            n: (place, found[place])
            for n, place in relative.items()
            if not place.endswith("/") and WORK not in PurePosixPath(n).parts
        }
        for n in self.files:
            _check_name(name, n)

    def size(self, name: str) -> int | None:
        """Bytes; None if the server does not report them."""
        size: int | None = self.files[name][1].get("size")
        return size

    def fetch(self, names: list[str], work: Path, *, room: int = 1) -> dict[str, Path]:
        """Download into a folder of `work`; a file that is complete there is not requested again.

        `room`: how often the files must fit on the disk. Raises DataError.
        """
        part = work / _digest(repr(sorted(self.files.items())))  # another for another version
        there = _sizes(part, names)
        left = [n for n in names if n not in there or there[n] != self.size(n)]
        need, free = room * sum(self.size(n) or 0 for n in left), shutil.disk_usage(work).free
        if need > free:
            raise DataError(
                f"{self.name} needs {text.size(need)}, but the disk of {work.parent} has only "
                f"{text.size(free)} free: free some space, or name a folder on a larger disk with "
                "--to"
            )
        for n in left:
            (part / n).parent.mkdir(parents=True, exist_ok=True)
        with _explained(self.name), _progress(self.name, len(left)) as bar:
            if len(left) == 1:  # bytes are counted, not files
                self.system.get_file(self.files[left[0]][0], str(part / left[0]), callback=bar)
            elif left:
                paths = [self.files[n][0] for n in left]
                self.system.get(paths, [str(part / n) for n in left], callback=bar)
        for n in left:
            if self.size(n) not in (None, (part / n).stat().st_size):
                (part / n).unlink()
                raise DataError(f"{self.name}: {n} came incomplete: run it again")
        return {n: part / n for n in names}


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
        # trust_env: use proxies. identity: the length is that of the file.
        options["client_kwargs"] = {"trust_env": True, "timeout": limits}
        options["headers"] = {"Accept-Encoding": "identity"}
    try:
        system, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # «Please install gcsfs to access Google Storage»
        raise DataError(f"{public_url(url)}: {error}") from None
    system.invalidate_cache()
    return system, path


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Convert the errors of file systems to DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # fsspec's http raises FileNotFoundError for any status
        if isinstance(cause, OSError) and cause.errno and type(cause).__module__ == "builtins":
            raise  # from this machine's disk
        said = re.sub(r"(https?://[^\s?]+)\?[^\s'\"]+", r"\1", f"{cause}")  # signed, so secret
        message = f"{type(cause).__name__}: {said}"
        if isinstance(cause, FileNotFoundError):
            message = "it does not exist, or you are not allowed to list it"
        raise DataError(f"{name}: {message}. Run it again: complete files are kept") from None


@contextlib.contextmanager
def _progress(name: str, count: int) -> Iterator[Any]:
    """Fsspec's callback with a bar on standard output: a saved notebook would have no widget."""
    from fsspec.callbacks import TqdmCallback

    watched = count > 0 and (sys.stdout.isatty() or "ipykernel" in sys.modules)
    what = {"unit": "B", "unit_scale": True} if count == 1 else {"unit": " files"}
    how = {"desc": name, "file": sys.stdout, "disable": not watched, "delay": 0.5, "leave": False}
    with TqdmCallback(tqdm_kwargs={**what, **how}) as callback:
        yield callback


def _take_files(remote: Remote, folder: Path, work: Path) -> list[str]:
    """Download the files that are missing in `folder`, and return the names of all."""
    there = _sizes(folder, remote.files)
    missing = [n for n in remote.files if n not in there or there[n] != remote.size(n)]
    _refuse_overwriting(folder, [n for n in missing if os.path.lexists(folder / n)], _KEPT)
    _move(remote.fetch(missing, work), folder)
    _clear(work)
    return [*remote.files]


def _take_archive(remote: Remote, folder: Path, work: Path) -> list[str]:
    """Download an archive and unpack it into `folder`, unless that would overwrite other files."""
    # The size of the content is unknown, but hardly smaller than the archive.
    [archive] = remote.fetch([remote.alone], work, room=2).values()
    fresh = work / "unpacked"
    shutil.rmtree(fresh, ignore_errors=True)
    unpack_archive(archive, fresh)
    files = {str(p.relative_to(fresh)): p for p in sorted(fresh.rglob("*")) if p.is_file()}
    for name in files:
        _check_name(archive.name, name)
    _move(files, folder)
    _clear(work)
    return [*files]


def _clear(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)


_BROKEN = (zipfile.BadZipFile, tarfile.TarError, EOFError, KeyError, LZMAError, zlib.error, OSError)


def unpack_archive(archive: Path, folder: Path) -> None:
    """Unpack an archive into a new folder.

    Raises DataError if it is broken (then it is removed), or has a member that is a link or a
    device or would be written outside of the folder.
    """
    name = archive.name
    try:
        if name.lower().endswith(".zip"):
            with zipfile.ZipFile(archive) as file:
                for member in file.namelist():  # shutil silently passes over what leads out
                    _check_name(name, member)
            shutil.unpack_archive(archive, folder)
        else:
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
                while file.fileobj.read(1 << 23):  # the checksum follows the last member
                    pass
    except tarfile.FilterError as error:
        raise DataError(f"{name}: {error}, so {name} is not used at all") from None
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
    places = {n: f"{root.rstrip('/')}/{n}" for n in local}
    with _explained(name):
        if system.isfile(root):
            raise DataError(f"{name} is a file: name a folder as the URL of --upload")
        there = [n for n in local if system.exists(places[n])]
        same = {n for n in there if _is_uploaded(local[n], system, places[n])}
        _refuse_overwriting(name, {*there} - same, "uploaded: name another folder")
        left = {n: path for n, path in local.items() if n not in same}
        with _progress(name, 2 * len(left)) as bar:
            system.put([*map(str, left.values())], [places[n] for n in left], callback=bar)
    known = f"; {len(same)} of {len(local)} files were already there" if same else ""
    sizes = {n: path.stat().st_size for n, path in left.items()}
    say(f"{name}: {_count(sizes)} uploaded{known}")


def _is_uploaded(path: Path, system: Any, place: str) -> bool:
    if system.size(place) != path.stat().st_size:
        return False
    with system.open(place, "rb") as there, open(path, "rb") as here:
        return all(
            here.read(len(chunk)) == chunk for chunk in iter(lambda: there.read(1 << 23), b"")
        )


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

    cache = Path(os.environ.get("KAGGLEHUB_CACHE") or Path.home() / ".cache/kagglehub")
    with _locked(cache):
        try:
            if "KAGGLE_DATA_PROXY_URL" not in os.environ:  # set in Kaggle notebooks
                # kagglehub's client would wait forever for a server that does not answer.
                requests.head(get_endpoint(get_env()), timeout=READ_TIMEOUT)
            return str(get(source.handle, path=source.file))
        except (requests.HTTPError, exceptions.UnauthenticatedError) as error:
            message = f"{' '.join(str(error).split())} (tokens: https://www.kaggle.com/settings)"
        except requests.RequestException as error:
            message = f"no connection ({type(error).__name__}): is this machine on the internet?"
            if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
                message = (
                    "no connection: turn Internet on (Settings), or add the data with «Add Input»"
                )
        except (ValueError, exceptions.BackendError, exceptions.DataCorruptionError) as error:
            message = " ".join(str(error).split())
    raise DataError(f"{source.url}: {message}")
