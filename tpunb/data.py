"""`%tpu_data` and `tpunb data`: download data, or upload results.

Kaggle's datasets, models and competitions are downloaded with kagglehub: DIR becomes a link to
kagglehub's copy, in its cache or in the mounted inputs of a Kaggle notebook. Everything else that
has a URL is read through fsspec, into DIR; DIR/.tpunb-data has what is not complete yet, and for
each source the sizes of its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tpunb.utils import records, text
from tpunb.utils.errors import DataError, MissingPackageError
from tpunb.utils.files import write_json
from tpunb.utils.install_commands import PIP_INSTALL
from tpunb.utils.options import argument, option

HELP = "download data, or upload results; nothing is transferred twice or overwritten"
WORK = ".tpunb-data"
DEFAULT = Path("data")
"""Folder that holds one folder for each source if --to is not given."""
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
READ_TIMEOUT = 30.0
"""Seconds without a byte after which a web server counts as lost."""
_WEB = ("http://", "https://")
_OF_KAGGLE = (
    "kaggle://competitions/NAME, kaggle://datasets/OWNER/NAME, "
    "kaggle://models/OWNER/MODEL/FRAMEWORK/VARIATION or the address of its page"
)


@dataclass(frozen=True)
class DataOptions:
    """Options of `%tpu_data` and `tpunb data`."""

    source: str = argument(
        "SOURCE",
        help=f"{_OF_KAGGLE}, gs://…, https://… or another URL that fsspec supports; with --upload: "
        "a local folder",
        required=True,
    )
    to: str | None = option(
        "--to", metavar="DIR", help="the folder to download to (default: data/NAME)"
    )
    upload: str | None = option(
        "--upload",
        metavar="URL",
        help="upload the folder SOURCE to this URL, e.g. gs://BUCKET/NAME",
    )


def run(options: DataOptions, say: Callable[[str], None]) -> None:
    """Download or upload; `say` shows a line. Raises DataError or MissingPackageError."""
    source, url = options.source, options.upload
    if not source:  # an upload would send the whole working directory
        raise DataError("SOURCE is empty: is a variable in it not set?")
    if url and options.to:
        raise DataError("--upload cannot be combined with --to, which is for downloads")
    public = _public(url or source)
    try:
        if url:
            _upload(Path(source).expanduser(), url, say)
        elif kaggle := parse_kaggle(source):
            name = kaggle.handle.split("/")[0 if kaggle.kind == "competition" else 1]
            with _locked(Path(os.environ.get("KAGGLEHUB_CACHE") or "~/.cache/kagglehub"), say):
                say(_link_kaggle(kaggle, Path(options.to or DEFAULT / name).expanduser()))
        elif "://" in source:
            parts = urlsplit(public)
            name = Path(parts.path).stem.removesuffix(".tar").strip(".") or parts.netloc
            _download(source, Path(options.to or DEFAULT / name).expanduser(), say)
        else:
            raise DataError(
                f"invalid source {source!r}: expected a URL such as kaggle://competitions/NAME, "
                "gs://BUCKET/FOLDER or https://…; to upload a local folder, add --upload URL"
            )
    except (DataError, MissingPackageError):
        raise
    except Exception as error:  # kagglehub and each of fsspec's file systems have their own
        # fsspec's http raises FileNotFoundError for any status.
        cause = (isinstance(error, FileNotFoundError) and error.__cause__) or error
        said = re.sub(r"\?[^\s'\")]+", "", f"{cause}")  # a signed query is secret
        raise DataError(
            f"{public}: {type(cause).__name__}: {said}. Complete files are kept: "
            "to continue, run it again"
        ) from None


def _download(source: str, folder: Path, say: Callable[[str], None]) -> None:
    name, key = _public(source), hashlib.sha256(source.encode()).hexdigest()[:12]
    record = folder / WORK / f"{key}.json"

    def sizes() -> dict[str, int]:
        """The sizes of the files, if an earlier download has left all of them here."""
        known: dict[str, int] = records.read_dict(record)
        return known if _sizes(folder, known) == known else {}

    told = "nothing was downloaded"
    if not sizes():
        system, files = _list(source)
        with _locked(record.parent, say) as work:
            if not sizes():  # another call, which this one has waited for, may have downloaded it
                told = "downloaded"
                names = _fetch(system, files, folder, work / key, name)
                write_json(record, _sizes(folder, names))
    say(f"{name} is in {folder} ({_count(sizes())}); {told}")


def _public(url: str) -> str:
    """Return a URL without the parts that may be secret: user, password, signed query."""
    return re.sub(r"(?<=://)[^/?#]*@|[?#].*", "", url)


# --- The folder on this machine ---


@contextlib.contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Create the folder, and wait until no other call uses it."""
    folder = folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another download uses {folder}: waiting for its end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _sizes(folder: Path, names: Iterable[str]) -> dict[str, int]:
    return {n: (folder / n).stat().st_size for n in names if (folder / n).is_file()}


def _count(sizes: Mapping[str, int]) -> str:
    names = "1 file" if len(sizes) == 1 else f"{len(sizes)} files"
    return f"{names}, {text.size(sum(sizes.values()))}"


def _refuse_overwriting(folder: object, names: Iterable[str]) -> None:
    if taken := sorted(names):
        first = ", ".join(taken[:3]) + (", …" if len(taken) > 3 else "")
        raise DataError(
            f"{folder} has other files with these names: {first}. Nothing was overwritten: move "
            "them away, or name another folder"
        )


# --- Download and upload ---


def _file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if url.startswith(_WEB):
        import aiohttp

        limits = aiohttp.ClientTimeout(
            total=None, sock_connect=READ_TIMEOUT, sock_read=READ_TIMEOUT
        )
        # trust_env: use proxies. identity: the length is that of the file.
        options["client_kwargs"] = {"trust_env": True, "timeout": limits}
        options["headers"] = {"Accept-Encoding": "identity"}
    system, path = url_to_fs(url, skip_instance_cache=True, **options)
    system.auto_mkdir = True  # only folders of this machine have to be made
    return system, path


def _list(url: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return the file system of a URL, and what it says of each file there, by name."""
    system, path = _file_system(url)
    if url.startswith(_WEB) or system.isfile(path):
        files = {Path(unquote(urlsplit(path).path)).name or "index": system.info(path)}
    else:
        files = {
            place.removeprefix(path.rstrip("/") + "/"): info
            for place, info in system.find(path, detail=True).items()
            if not place.endswith("/")  # a folder
        }
    if not files:
        raise DataError(f"{_public(url)} does not exist, or you are not allowed to list it")
    if outside := [name for name in files if name.startswith("/") or ".." in name.split("/")]:
        raise DataError(f"the name {outside[0]!r} leads out of the folder, so nothing is used")
    return system, files


def _fetch(
    system: Any, files: Mapping[str, dict[str, Any]], folder: Path, part: Path, name: str
) -> Iterable[str]:
    """Download files by way of the folder `part` to `folder`; return their names there."""
    there = _sizes(part, files)
    left = {n: i["name"] for n, i in files.items() if n not in there or there[n] != i["size"]}
    for n in left:
        (part / n).parent.mkdir(parents=True, exist_ok=True)
    with _progress(name, len(left)) as bar:
        if len(left) == 1:  # bytes are counted, not files
            [(n, place)] = left.items()
            system.get_file(place, str(part / n), callback=bar)
        elif left:
            system.get([*left.values()], [str(part / n) for n in left], callback=bar)
    fresh = {n: part / n for n in files}
    # Archives are recognised by name, because .npz and .docx files are zips too. Those in a
    # bucket's folder stay packed.
    if len(files) == 1 and name.lower().endswith(ARCHIVES):
        [archive], unpacked = fresh.values(), part / "unpacked"
        try:
            _unpack(archive, unpacked)
        except Exception:
            shutil.rmtree(part)  # for another try, it has to come again
            raise
        inside = (path for path in unpacked.rglob("*") if path.is_file())
        fresh = {str(path.relative_to(unpacked)): path for path in inside}
    _refuse_overwriting(folder, (n for n in fresh if not _is_free(folder / n, fresh[n])))
    for n in fresh:  # all before the first file is moved: a file may be in the place of a folder
        (folder / n).parent.mkdir(parents=True, exist_ok=True)
    for n, path in fresh.items():
        path.replace(folder / n)
    shutil.rmtree(part)
    return fresh


def _is_free(place: Path, new: Path) -> bool:
    """True if nothing is at a place, or a file with the content of the new one."""
    same = place.is_file() and filecmp.cmp(new, place, shallow=False)
    return same or not os.path.lexists(place)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive; nothing is written outside of the folder, and no device is made."""
    shutil.rmtree(folder, ignore_errors=True)
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as file:  # shutil passes over each name with '..' in it
            file.extractall(folder)
    else:
        shutil.unpack_archive(archive, folder, filter="data")


def _progress(name: str, count: int) -> Any:
    """Fsspec's callback with a bar on standard output: a saved notebook would have no widget."""
    from fsspec.callbacks import TqdmCallback

    watched = sys.stdout.isatty() or "ipykernel" in sys.modules
    what = {"desc": name, "unit": "B" if count == 1 else " files", "unit_scale": True}
    how = {"file": sys.stdout, "disable": not watched, "delay": 0.5, "leave": False}
    return TqdmCallback(tqdm_kwargs={**what, **how})


def _upload(folder: Path, url: str, say: Callable[[str], None]) -> None:
    """Upload a file, or the files of a folder, to a URL, except those that are already there."""
    if url.startswith(_WEB):
        raise DataError(f"cannot upload to {url}: name a bucket, as in gs://NAME/FOLDER")
    paths = [folder] if folder.is_file() else [*folder.rglob("*")]
    root = folder.parent if folder.is_file() else folder
    local = {str(p.relative_to(root)): p for p in paths if p.is_file() and WORK not in p.parts}
    if not local:
        raise DataError(f"{folder} is empty or does not exist: there is nothing to upload")
    name = _public(url)
    system, place = _file_system(url)
    places = {n: f"{place.rstrip('/')}/{n}" for n in local}
    there = [n for n in local if system.exists(places[n])]
    same = {n for n in there if _is_uploaded(local[n], system, places[n])}
    _refuse_overwriting(name, {*there} - same)
    left = {n: path for n, path in local.items() if n not in same}
    with _progress(name, 2 * len(left)) as bar:
        system.put([*map(str, left.values())], [places[n] for n in left], callback=bar)
    known = f"; {len(same)} of {len(local)} files were already there" if same else ""
    say(f"{name}: {_count(_sizes(root, left))} uploaded{known}")


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
    r"(kaggle://|(?P<page>https?://(www\.)?kaggle\.com/))"
    rf"((c|competitions)/(?P<competition>{_SLUG})"
    rf"|datasets/(?P<dataset>{_SLUG}/{_SLUG}(/versions/\d+)?)"
    rf"|models/(?P<model>{_SLUG}(/{_SLUG}){{3}}(/\d+)?))/?"
    r"(?(page)([\w-]+/?)?([?#].*)?)"  # a tab of the page, such as data
)


class KaggleSource(NamedTuple):
    """A competition, dataset or model of Kaggle."""

    kind: str
    """'competition', 'dataset' or 'model'."""
    handle: str
    """kagglehub's: NAME, OWNER/NAME[/versions/N] or OWNER/MODEL/FRAMEWORK/VARIATION[/N]."""


def parse_kaggle(source: str) -> KaggleSource | None:
    """Parse a source; None if it is not Kaggle's. Raises DataError for a wrong form."""
    if not re.match(r"kaggle://|https?://(www\.)?kaggle\.com/", source):
        return None
    match = _KAGGLE.fullmatch(source)
    if match is None:
        raise DataError(f"{source} does not have one of the forms {_OF_KAGGLE}")
    kind = next(kind for kind in ("competition", "dataset", "model") if match[kind])
    return KaggleSource(kind, match[kind])


def _link_kaggle(source: KaggleSource, folder: Path) -> str:
    """Make `folder` a link to kagglehub's copy; return what to say."""
    if folder.is_symlink() and folder.exists():
        # A version: kagglehub has chosen it if the handle has none.
        copy = rf".*/{source.kind}s/{re.escape(source.handle)}(/(versions/)?\d+)?"
        if re.fullmatch(copy, str(folder.resolve())):
            return f"{source.handle} is already in {folder}; nothing was downloaded"
    # Only kagglehub knows where a Kaggle notebook mounts the source.
    path = "" if folder.exists() and not folder.is_symlink() else _ask_kagglehub(source)
    if folder.exists() and not (path and folder.samefile(path)):
        raise DataError(
            f"{folder} already exists and does not come from {source.handle}: move it away, or "
            "name another folder with --to"
        )
    folder.unlink(missing_ok=True)  # its target may have been removed from the cache
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(Path(path).absolute())
    return f"{source.handle} is in {folder}, a link to {path}"


def _ask_kagglehub(source: KaggleSource) -> str:
    """Return the path of kagglehub's copy: mounted, or downloaded now or earlier."""
    try:
        import kagglehub
    except ImportError:
        install = f"`{PIP_INSTALL} 'tpunb[kaggle]'`"
        raise MissingPackageError("kagglehub", "data from Kaggle", install) from None
    return str(getattr(kagglehub, f"{source.kind}_download")(source.handle))
