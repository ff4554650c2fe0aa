"""Who this is at Kaggle: where the credentials come from, and whether they are kept well.

In the order of Kaggle's own client (kagglesdk 0.1.37, kaggle_env.py; kaggle 2.2.4,
`KaggleApi.authenticate`): an access token, then a key, then a login by its browser flow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpunb.data import files, web
from tpunb.data.remote import shown
from tpunb.errors import DataError, SetupError

NEW_TOKEN = (
    "make a token at https://www.kaggle.com/settings (API) and put it into "
    "~/.kaggle/access_token with mode 600 or into KAGGLE_API_TOKEN, or give a kaggle.json with "
    "--credentials PATH|URL"
)


@dataclass(frozen=True)
class Credentials:
    """What to log in with. Neither printed nor kept anywhere."""

    origin: str
    """Where it comes from, in words."""
    username: str | None = None
    key: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    login: Path | None = None
    """The file of a login through the browser; Kaggle's client takes the token from it."""


def find(env: Mapping[str, str]) -> Credentials | None:
    """The first there are. Raises SetupError for a file that others can read."""
    home = Path(env.get("HOME") or Path.home()) / ".kaggle"
    return _token(env, home) or _key(env, home) or _login(home)


def _token(env: Mapping[str, str], home: Path) -> Credentials | None:
    given = env.get("KAGGLE_API_V1_TOKEN")
    if given and "KAGGLE_KERNEL_RUN_TYPE" in env and (text := _read(Path(given))):
        return Credentials("the Kaggle notebook's own token", token=text)
    given = env.get("KAGGLE_API_TOKEN")
    if given and not Path(given).exists():
        return Credentials("KAGGLE_API_TOKEN", token=given)
    if given:
        text = _private(Path(given))
        return Credentials(f"{given}, named by KAGGLE_API_TOKEN", token=text) if text else None
    for name in ("access_token", "access_token.txt"):
        if text := _private(home / name):
            return Credentials(str(home / name), token=text)
    return None


def _key(env: Mapping[str, str], home: Path) -> Credentials | None:
    path = folder(env) / "kaggle.json"
    from_file = {}
    if text := _private(path):
        try:
            from_file = _checked(text)
        except ValueError:
            raise SetupError(
                f"{path} is not the kaggle.json that Kaggle gives: {NEW_TOKEN}"
            ) from None
    username = env.get("KAGGLE_USERNAME") or from_file.get("username")
    key = env.get("KAGGLE_KEY") or from_file.get("key")
    if not (username and key):
        return None
    names = [name for name in ("KAGGLE_USERNAME", "KAGGLE_KEY") if env.get(name)]
    places = [*names, *([] if len(names) == 2 else [str(path)])]
    return Credentials(" and ".join(places), username=username, key=key)


def _login(home: Path) -> Credentials | None:
    path = home / "credentials.json"
    return Credentials(str(path), login=path) if _private(path) else None


def folder(env: Mapping[str, str]) -> Path:
    """Where Kaggle's client keeps kaggle.json."""
    if env.get("KAGGLE_CONFIG_DIR"):
        return Path(env["KAGGLE_CONFIG_DIR"])
    user = Path(env.get("HOME") or Path.home())
    xdg = Path(env.get("XDG_CONFIG_HOME") or user / ".config") / "kaggle"
    home = user / ".kaggle"
    return xdg if not home.exists() and (xdg / "kaggle.json").exists() else home


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read ({error})") from None


def _private(path: Path) -> str:
    """A file's text, '' if there is none. Raises SetupError if others could have read it."""
    text = _read(path)
    if text and path.stat().st_mode & 0o077:
        mode = path.stat().st_mode & 0o777
        raise SetupError(
            f"{path} holds a secret, and other users of this machine may read it (mode {mode:o}): "
            f"`chmod 600 {path}`"
        )
    return text


def _checked(text: str) -> dict[str, str]:
    """What a kaggle.json says. Raises ValueError for anything else, without its content."""
    try:
        found = json.loads(text)
        return {name: str(found[name]) for name in ("username", "key")}
    except (ValueError, KeyError, TypeError):
        raise ValueError("no kaggle.json") from None


def _not_kaggles(name: str) -> SetupError:
    return SetupError(f"{name} is not the kaggle.json that Kaggle gives: {NEW_TOKEN}")


def install(given: str, env: Mapping[str, str]) -> str:
    """Put a kaggle.json, from a path or URL, where it is looked for, with mode 600; says so.

    Raises DataError or SetupError if it is none, or if there is another one already.
    """
    text = _fetched(given)
    name = shown(given) if "://" in given else given
    try:
        values = _checked(text)
    except ValueError:
        raise _not_kaggles(name) from None
    path = folder(env) / "kaggle.json"
    if path.exists():
        try:
            same = _checked(_read(path)) == values
        except ValueError:
            same = False
        if not same:
            raise SetupError(f"{path} is there already, with other content: move it away first")
        path.chmod(0o600)
        return f"{path} has the same content already; its mode is 600"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(json.dumps(values))
    said = f"{name} is in place as {path}, with mode 600"
    if "://" not in given and Path(given).stat().st_mode & 0o077:
        said += f"; other users may still read {given}: `chmod 600 {given}`, or remove it"
    return said


def _fetched(given: str) -> str:
    if "://" not in given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise DataError(f"there is no file {given}")
        return _read(path)
    if given.startswith(("http://", "https://")):
        with web.WebFile(given).open(0, "") as opened:
            return b"".join(opened.chunks).decode("utf-8", "replace")
    there = files.place(given)
    with there.errors():
        data: bytes = there.system.cat_file(there.path)
    return data.decode("utf-8", "replace")
