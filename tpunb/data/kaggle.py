"""Competitions, datasets and models of Kaggle: where they are mounted, or how they are fetched.

What is asked goes through kagglesdk, the part of Kaggle's own client that speaks to its service.
Importing `kaggle` itself logs in at once, over the network, and makes folders.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpunb.data import credentials, web
from tpunb.data.credentials import Credentials
from tpunb.errors import DataError, MissingPackageError

INPUTS = Path("/kaggle/input")
PAGE = "https://www.kaggle.com"
_SLUG = re.compile(r"[A-Za-z0-9][\w.-]*")
_FORMS = """
  kaggle://competitions/NAME[/FILE]
  kaggle://datasets/OWNER/NAME[/versions/N][/FILE]
  kaggle://models/OWNER/MODEL/FRAMEWORK/VARIATION[/VERSION]
or the address of its page"""


@dataclass(frozen=True)
class Thing:
    """Something of Kaggle's."""

    kind: str
    """'competitions', 'datasets' or 'models'."""
    path: tuple[str, ...]
    """NAME; OWNER, NAME; or OWNER, MODEL, FRAMEWORK, VARIATION."""
    version: int | None = None
    file: str | None = None
    """One file of it; None: all."""

    @property
    def url(self) -> str:
        """How it is written."""
        parts = [self.kind, *self.path]
        if self.version is not None:
            parts += ["versions"] if self.kind == "datasets" else []
            parts.append(str(self.version))
        return "kaggle://" + "/".join([*parts, *([self.file] if self.file else [])])

    @property
    def page(self) -> str:
        return f"{PAGE}/{self.kind}/{'/'.join(self.path)}"

    @property
    def name(self) -> str:
        """What a folder for it is called."""
        return self.path[1] if self.kind != "competitions" else self.path[0]


def parse(source: str) -> Thing | None:
    """What a source names; None for what is not Kaggle's. Raises DataError for what is unclear."""
    page = re.match(r"https?://(?:www\.)?kaggle\.com/", source)
    if page:
        words = source[page.end() :].partition("?")[0].partition("#")[0].strip("/").split("/")
    elif source.startswith("kaggle://"):
        words = source.removeprefix("kaggle://").strip("/").split("/")
    else:
        return None
    kind = {"c": "competitions"}.get(words[0], words[0])
    count = {"competitions": 1, "datasets": 2, "models": 4}.get(kind, 0)
    path, rest = tuple(words[1 : 1 + count]), words[1 + count :]
    if not count or len(path) < count or not all(map(_SLUG.fullmatch, path)):
        raise DataError(f"{source} is none of{_FORMS}")
    version = None
    if kind == "datasets" and rest[:1] == ["versions"] and rest[1:2]:
        version, rest = _number(source, rest[1]), rest[2:]
    elif kind == "models" and rest:
        version, rest = _number(source, rest[0]), rest[1:]
    if page:  # '/data', '/overview', …: the tabs of a page
        rest = []
    if rest and (kind == "models" or ".." in rest):
        raise DataError(f"{source} is none of{_FORMS}")
    return Thing(kind, path, version, "/".join(rest) or None)


def _number(source: str, text: str) -> int:
    if not text.isdecimal():
        raise DataError(f"{source}: {text!r} is not the number of a version")
    return int(text)


def mounted(thing: Thing, env: Mapping[str, str], inputs: Path | None = None) -> Path | None:
    """Where a Kaggle notebook has it, if it was added there as an input.

    Both layouts that notebooks use in 2026 are known: with the kind and owner in the path, and
    the older one without.
    """
    root = inputs or INPUTS
    if "KAGGLE_KERNEL_RUN_TYPE" not in env or not root.is_dir():
        return None
    path = [part.lower() if at == 2 else part for at, part in enumerate(thing.path)]
    older = path if thing.kind == "competitions" else path[1:]
    for folder in (root.joinpath(thing.kind, *path), root.joinpath(*older)):
        found = folder
        if thing.kind == "models":
            versions = [int(p.name) for p in folder.glob("*") if p.name.isdecimal()]
            wanted = thing.version if thing.version is not None else max(versions, default=None)
            found = folder / str(wanted)
        if thing.file:
            found = found / thing.file
        if found.exists():
            return found
    return None


def locate(thing: Thing, env: Mapping[str, str]) -> tuple[web.WebFile, str]:
    """The file that Kaggle sends for it, and where the credentials come from.

    Raises MissingPackageError, SetupError or DataError.
    """
    found = credentials.find(env)
    if found is None and thing.kind == "competitions":
        raise DataError(
            f"{thing.url}: only who takes part gets a competition's data, and no credentials for "
            f"Kaggle were found: {credentials.NEW_TOKEN}"
        )
    try:
        from kagglesdk import KaggleClient
    except ImportError:
        raise MissingPackageError("kaggle", "data from Kaggle", "`pip install kaggle`") from None
    with _errors(thing, found, env):
        _reach()
        with KaggleClient(**_login(found)) as client:
            response = _ask(client, thing)
            with response:
                url, headers = response.url, dict(response.request.headers)
    # Of the request that was redirected: it carries the login only if the server is the same.
    kept = {name: headers[name] for name in ("Authorization", "User-Agent") if name in headers}
    origin = found.origin if found else "no credentials"
    return web.WebFile(url, kept, _file_name(thing, url)), origin


def _reach() -> None:
    """Whether Kaggle's service answers at all. Its client would wait for minutes."""
    import urllib.error
    import urllib.request

    from kagglesdk.kaggle_env import get_endpoint, get_env

    endpoint = get_endpoint(get_env())
    try:
        web.ask(urllib.request.Request(endpoint, method="HEAD")).close()
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:
        raise web.unreachable(endpoint, error.reason) from None


def _login(found: Credentials | None) -> dict[str, str]:
    """What Kaggle's client is given. The endpoint is chosen as it does, by its environment."""
    if found is None:
        return {}
    if found.login is not None:
        from kagglesdk import KaggleClient
        from kagglesdk.kaggle_creds import KaggleCredentials

        with KaggleClient() as client:
            kept = KaggleCredentials.load(client, str(found.login))
            token = kept.get_access_token() if kept else None
        return {"api_token": token} if token else {}
    if found.token is not None:
        return {"api_token": found.token}
    return {"username": found.username or "", "password": found.key or ""}


def _ask(client: Any, thing: Thing) -> Any:
    """Kaggle's answer: a response whose body, the file, has not been read yet."""
    if thing.kind == "competitions":
        from kagglesdk.competitions.types import competition_api_service as types

        service = client.competitions.competition_api_client
        if thing.file is None:
            request = types.ApiDownloadDataFilesRequest()
            request.competition_name = thing.path[0]
            return service.download_data_files(request)
        request = types.ApiDownloadDataFileRequest()
        request.competition_name, request.file_name = thing.path[0], thing.file
        return service.download_data_file(request)
    if thing.kind == "datasets":
        from kagglesdk.datasets.types.dataset_api_service import ApiDownloadDatasetRequest

        request = ApiDownloadDatasetRequest()
        request.owner_slug, request.dataset_slug = thing.path
        request.dataset_version_number = thing.version
        request.file_name = thing.file
        return client.datasets.dataset_api_client.download_dataset(request)
    return _ask_model(client, thing)


def _ask_model(client: Any, thing: Thing) -> Any:
    from kagglesdk.models.types import model_api_service as types

    version = thing.version
    if version is None:
        request = types.ApiGetModelInstanceRequest()
        _name_model(request, thing)
        version = client.models.model_api_client.get_model_instance(request).version_number
    request = types.ApiDownloadModelInstanceVersionRequest()
    _name_model(request, thing)
    request.version_number = version
    return client.models.model_api_client.download_model_instance_version(request)


def _name_model(request: Any, thing: Thing) -> None:
    from kagglesdk.models.types.model_enums import ModelFramework

    plain = thing.path[2].replace("-", "").replace("_", "").lower()
    known = {
        name.removeprefix("MODEL_FRAMEWORK_").replace("_", "").lower(): one
        for name, one in ModelFramework.__members__.items()
    }
    if plain not in known:
        names = ", ".join(sorted(known.keys() - {"unspecified"}))
        raise DataError(f"{thing.url}: Kaggle knows no framework {thing.path[2]!r}, but {names}")
    request.owner_slug, request.model_slug = thing.path[0], thing.path[1]
    request.framework, request.instance_slug = known[plain], thing.path[3]


def _file_name(thing: Thing, url: str) -> str:
    """What Kaggle sends: of a single file, it may be the file in a zip."""
    if thing.file is None:
        return f"{thing.name}.{'tar.gz' if thing.kind == 'models' else 'zip'}"
    sent = web.WebFile(url).name
    name = thing.file.rpartition("/")[2]
    return f"{name}.zip" if sent == f"{name}.zip" else name


@contextlib.contextmanager
def _errors(thing: Thing, found: Credentials | None, env: Mapping[str, str]) -> Iterator[None]:
    """What Kaggle answers, in words that say what to do."""
    import requests

    try:
        yield
    except requests.exceptions.HTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise DataError(f"{thing.url}: {_meaning(status, str(error), thing, found)}") from None
    except requests.exceptions.RequestException as error:
        cause = type(error).__name__
        raise DataError(f"Kaggle cannot be reached ({cause}): {web.no_internet(env)}") from None


def _meaning(status: int, said: str, thing: Thing, found: Credentials | None) -> str:
    origin = found.origin if found else ""
    if found is None and status in (401, 403):
        return f"Kaggle wants a login, and no credentials were found: {credentials.NEW_TOKEN}"
    if status == 401:
        return (
            f"Kaggle does not know the credentials from {origin} (401): they are mistyped, or "
            f"were replaced by newer ones; {credentials.NEW_TOKEN}"
        )
    if status == 403 and thing.kind == "competitions":
        return (
            f"Kaggle refuses (403). Most often the rules are not accepted yet: log in as the owner "
            f"of the credentials from {origin}, and accept them at {thing.page}/rules"
        )
    if status == 403:
        consent = " or its licence is not accepted yet" if thing.kind == "models" else ""
        return (
            f"Kaggle refuses (403): it is private{consent}. Look at {thing.page}, logged in as "
            f"the owner of the credentials from {origin}"
        )
    if status == 404:
        return f"there is no such thing (404): check the spelling at {thing.page}"
    if status == 429:
        return "too many requests (429): wait some minutes"
    return f"Kaggle answers {status}: {web.plain(said)}"
