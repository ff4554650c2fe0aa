"""Reads `places.toml`: the places that runs can be sent to, of the project and of the user.

    [places.pod]
    kind = "gcloud-tpu"
    name = "my-v5e-16"
    zone = "us-west4-a"
    files = ["*.py", "data/small.csv"]

The file is searched for in the working directory and its parents, up to the one with `.git` or the
home folder, and then as `tpunb/places.toml` in the user's configuration folder ($XDG_CONFIG_HOME,
~/.config). A place of the project hides a place of the user with the same name.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from tpunb.places.errors import PlaceError
from tpunb.places.slices import ACCELERATORS, Slice, find_slice
from tpunb.utils import files, owners, records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Settings = TypeVar("_Settings", bound="Settings")

FILE = "places.toml"
PORT = 8460
"""Default port at which host 0 listens for the others. The ports for the rendezvous and the ranks'
store stay below 8471, where libtpu listens if one process drives a host (SPMD), and below the
ports of torch_xla's ranks."""


@dataclass(frozen=True)
class Settings:
    """Settings of a place."""


@dataclass(frozen=True)
class SavingSettings(Settings):
    """Settings of places whose runs tpunb tells where to save."""

    checkpoints: str = ""
    """Where `tpunb.save` writes and `tpunb.load` reads: a folder that all hosts share, or a URL."""


@dataclass(frozen=True)
class HostSettings(SavingSettings):
    """Settings of every place with existing hosts."""

    python: str = "python3"
    """The interpreter on each host; with `environment = "make"`, that of the new environment."""
    folder: str = "~/.tpunb"
    """The folder on each host for runs, files and environments."""
    files: tuple[str, ...] = ()
    """Files and folders to copy to the hosts, relative to `places.toml` or the working directory:
    paths or patterns; `- PATTERN` leaves out what matches below them, as in rsync's filters."""
    environment: Literal["check", "make"] = "check"
    """Whether the hosts' packages are only compared with the local ones, or installed with uv."""
    cores: int | None = None
    """Ranks of each host; None: one for each chip, or 4 rehearsal cores without a TPU."""
    port: int = PORT
    ask_above: float | None = None
    """Ask before a run that may cost more dollars. None: never ask."""


@dataclass(frozen=True)
class SshSettings(HostSettings):
    """`kind = "ssh"`: hosts, named as for ssh."""

    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class GcloudTpuSettings(HostSettings):
    """`kind = "gcloud-tpu"`: a TPU VM of one or more hosts."""

    name: str = ""
    zone: str = ""
    project: str = ""
    internal_ip: bool = False
    """Connect to the hosts' internal addresses, from a machine in the same network."""


@dataclass(frozen=True)
class GcloudMigSettings(GcloudTpuSettings):
    """`kind = "gcloud-mig"`: the VMs of a managed instance group."""

    tunnel: bool = False
    """Connect through Identity-Aware Proxy, for VMs without an external address."""


@dataclass(frozen=True)
class JobSetSettings(SavingSettings):
    """`kind = "jobset"`: a Kubernetes cluster with TPUs, for `tpunb submit --manifest`."""

    accelerator: str = ""
    """'v6e': one of `slices.ACCELERATORS`."""
    topology: str = ""
    """'4x4': chips along each side."""
    image: str = ""
    """Container image with tpunb, torch, torch_xla or torch_tpu, and the notebook's packages."""
    chips_per_host: int | None = None
    """Needed if the topology leaves a choice; None: 4, or 1 for a single chip."""
    namespace: str = ""
    """'': that of kubectl's context."""
    queue: str = ""
    """Kueue's LocalQueue; without one the pods start as soon as the cluster has room."""
    service_account: str = ""
    """Kubernetes service account of the pods, for access to a bucket."""

    @property
    def slice(self) -> Slice:
        """The slice of a run. Raises ValueError: see `find_slice`."""
        return find_slice(self.accelerator, self.topology, self.chips_per_host)


@dataclass(frozen=True)
class KaggleSettings(Settings):
    """`kind = "kaggle"`: Kaggle, for `tpunb submit`."""

    accelerator: str = "TpuV5E8"
    """Kaggle's name of the accelerator; "": none, for a rehearsal on the session's processors."""
    session_hours: float = 9.0
    """Hours after which Kaggle ends the session. It has its own limit, too, 9 hours with a TPU."""
    internet: bool = True
    """Whether the session has internet access, with which the notebook installs tpunb."""


KINDS: Mapping[str, type[Settings]] = {
    "ssh": SshSettings,
    "gcloud-tpu": GcloudTpuSettings,
    "gcloud-mig": GcloudMigSettings,
    "jobset": JobSetSettings,
    "kaggle": KaggleSettings,
}
_NEEDED = {
    "ssh": {"hosts": 'hosts = ["10.0.0.2", "10.0.0.3"]'},
    "gcloud-tpu": {"name": 'name = "my-tpu"', "zone": 'zone = "us-west4-a"'},
    "gcloud-mig": {"name": 'name = "my-group"', "zone": 'zone = "us-west4-a"'},
    "jobset": {
        "accelerator": 'accelerator = "v6e"',
        "topology": 'topology = "4x4"',
        "image": 'image = "us-docker.pkg.dev/my-project/my-repository/tpunb"',
    },
    "kaggle": {},
}
"""Required keys of each kind, with an example."""
_WHOLE = {
    "folder": (re.compile(r"/|~(?:/|$)"), '"~/tpunb" or "/mnt/disk/tpunb"'),
    "checkpoints": (
        re.compile(r"/|[a-z0-9]+://"),
        '"/mnt/shared/checkpoints" or "gs://bucket/run"',
    ),
}
"""Paths on the hosts, which must be absolute: how they begin, with examples."""
_EXAMPLES = {
    tuple[str, ...]: '["…", "…"]',
    str: '"…"',
    int | None: "4",
    int: "8460",
    float | None: "20",
    float: "3600",
    bool: "true",
    Literal["check", "make"]: '"check" or "make"',
}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_HOST = re.compile(r"[A-Za-z0-9_\[:][^\s/]*")
"""A host for ssh, without a dash at the start: ssh would take it for an option."""
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A name in Kubernetes: a label of RFC 1123."""


@dataclass(frozen=True)
class PlaceConfig:
    """A place, as `places.toml` describes it."""

    name: str
    kind: str
    file: Path
    settings: Settings

    def settings_as(self, kind: type[_Settings]) -> _Settings:
        """The settings of a place that is known to be of this kind."""
        assert isinstance(self.settings, kind)
        return self.settings

    @property
    def host_settings(self) -> HostSettings:
        """The settings of a place with existing hosts, reached by ssh or gcloud."""
        return self.settings_as(HostSettings)

    def root(self, cwd: Path) -> Path:
        """The local folder from which files are copied: that of `places.toml`, or `cwd`."""
        return self.file.parent if cwd.is_relative_to(self.file.parent) else cwd

    def checkpoints(self, run_id: str) -> str:
        """Where a run saves checkpoints; '' if each host keeps its own."""
        shared = self.settings_as(SavingSettings).checkpoints.rstrip("/")
        return f"{shared}/{run_id}" if shared else ""

    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON values, for the run folder."""
        own = {item.name: getattr(self.settings, item.name) for item in fields(self.settings)}
        return {"name": self.name, "kind": self.kind, "file": str(self.file), "settings": own}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlaceConfig:
        """The inverse of `to_json`. Raises ValueError."""
        try:
            kind = KINDS[data["kind"]]
            settings = records.build(kind, data["settings"])
            return cls(str(data["name"]), str(data["kind"]), Path(data["file"]), settings)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a place: {error}") from None


def find_place(name: str, folder: Path) -> PlaceConfig:
    """Find the place `name` from a working directory.

    Raises PlaceError if no file describes it, or if its entry is invalid.
    """
    known: dict[str, Path] = {}
    files = list(_files(folder))
    for file in files:
        places = _read(file)
        if name in places:
            return _parse(file, name, places[name])
        known.update(dict.fromkeys(places, file))
    if not files:
        user = _user_file()
        raise PlaceError(
            f"there is no {FILE} in {folder} or its parents, nor {user}. Create one:\n"
            f'[places.{name}]\nkind = "ssh"\nhosts = ["10.0.0.2", "10.0.0.3"]',
            folder / FILE,
        )
    listed = ", ".join(map(str, files))
    raise PlaceError(
        f"{listed}: no place is named {name!r}{_meant(name, known)} (places: "
        f"{', '.join(sorted(known)) or 'none'})",
        files[0],
        f"places.{name}",
    )


def _user_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "tpunb" / FILE


def _files(folder: Path) -> list[Path]:
    """Existing files for a working directory, the nearest first."""
    found = []
    for parent in (folder, *folder.parents):
        found.append(parent / FILE)
        if (parent / ".git").exists() or parent == Path.home():
            break
    return [file for file in (*found, _user_file()) if file.is_file()]


def _read(file: Path) -> dict[str, Any]:
    """The places of a file. Raises PlaceError."""
    what = ""
    try:
        if not owners.is_trusted(file.lstat()):
            what = "is a link of another user" if file.is_symlink() else "belongs to another user"
        else:  # its target, if it is a link of this user
            data = tomllib.loads(files.read_text(file.resolve()))
    except PermissionError as error:
        what = f"is {error.strerror}"
    except OSError as error:
        raise PlaceError(f"{file} cannot be read: {error.strerror}", file) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlaceError(f"{file} is not valid TOML: {error}", file) from None
    if what:
        raise PlaceError(
            f"{file} {what}, and could send your code to hosts of their choice. "
            "Create a file of your own",
            file,
        )
    for key in data:
        if key != "places":
            meant = _meant(key, ["places"]) or " (only [places.NAME] tables are allowed)"
            raise PlaceError(f"{file}: unknown table {key!r}{meant}", file, key)
    places = data.get("places", {})
    if not isinstance(places, dict):
        raise PlaceError(f"{file}: places is not a table: write [places.NAME]", file, "places")
    return places


def _parse(file: Path, name: str, table: object) -> PlaceConfig:
    where = f"places.{name}"

    def wrong(key: str, problem: str) -> PlaceError:
        at = f"{where}.{key}" if key else where
        return PlaceError(f"{file}: {at}{problem}", file, at)

    if not _NAME.fullmatch(name):
        raise wrong("", ": a place's name consists of letters, digits, dashes and dots")
    if not isinstance(table, dict):
        raise wrong("", f" is not a table: write [{where}]")
    kinds = " or ".join(f'"{kind}"' for kind in KINDS)
    if "kind" not in table:
        raise wrong("kind", f" is missing: write kind = {kinds}")
    kind = table["kind"]
    if kind not in KINDS:
        meant = _meant(str(kind), KINDS)
        raise wrong("kind", f" = {kind!r} is unknown{meant}: write kind = {kinds}")
    values: dict[str, Any] = {}
    made: Any = KINDS[kind]
    types = records.hints(made)
    for key, value in table.items():
        if key == "kind":
            continue
        if key not in types:
            keys = f'(keys of kind "{kind}": {", ".join(types)})'
            raise wrong(key, f" is unknown{_meant(key, types)} {keys}")
        try:
            values[key] = records.convert(types[key], value)
        except ValueError:
            example = _EXAMPLES.get(types[key], '"…"')
            raise wrong(key, f" = {value!r} has the wrong type: write {key} = {example}") from None
    for key, example in _NEEDED[kind].items():
        if not values.get(key):
            raise wrong(key, f" is missing: write {example}")
    for key, (whole, example) in _WHOLE.items():
        # Each program that reads a relative path would start from another folder.
        if (path := values.get(key)) and not whole.match(path):
            raise wrong(key, f" = {path!r} is not an absolute path: write {key} = {example}")
    settings = made(**values)
    for key, problem in _wrong_values(settings):
        raise wrong(key, problem)
    return PlaceConfig(name, kind, file, settings)


def _wrong_values(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield keys with an invalid value, and what is wrong with it."""
    match settings:
        case SshSettings(hosts=hosts):
            for host in hosts:
                if not _HOST.fullmatch(host):
                    then = "write it as for ssh, [USER@]HOST"
                    yield "hosts", f": {host!r} is not a host name: {then}"
                if hosts.count(host) > 1:
                    yield "hosts", f" names {host!r} twice"
        case KaggleSettings(session_hours=hours) if hours < 0.1:
            limit = "(Kaggle ends a session with a TPU after 9)"
            yield "session_hours", f" = {hours!r}: write at least 0.1 hours {limit}"
        case JobSetSettings() if (found := _wrong_in(settings)) is not None:
            key, problem = found
            yield key, f" = {getattr(settings, key)!r}{problem}"


def _wrong_in(settings: JobSetSettings) -> tuple[str, str] | None:
    """The invalid key of a place of kind "jobset", and its problem; None if all are valid."""
    try:
        _ = settings.slice
    except ValueError as error:
        key, known = error.args
        meant = _meant(settings.accelerator, ACCELERATORS) if key == "accelerator" else ""
        return key, f" does not exist{meant} ({known})"
    for key in ("namespace", "queue", "service_account"):
        value = getattr(settings, key)
        if value and not _OBJECT.fullmatch(value):
            return key, ": a name in Kubernetes consists of lower-case letters, digits and dashes"
    if re.search(r"\s", settings.image):
        return "image", ": an image's name must not contain spaces"
    return None


def _meant(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
