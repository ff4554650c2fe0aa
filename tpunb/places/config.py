"""Reads `places.toml`: the places that runs can be sent to, of the project and of the user.

    [places.pod]
    kind = "gcloud-tpu"
    name = "my-v5e-16"
    zone = "us-west4-a"
    files = ["*.py", "data/small.csv"]

The file is searched for in the working directory and its parents, up to the one with `.git` or the
home folder, and then as `tpunb/places.toml` in the user's configuration folder ($XDG_CONFIG_HOME,
~/.config). A place of the project hides a place of the user with the same name.

A kind of place is a dataclass: its fields are the keys, with their types; those without a default
are required.
"""

from __future__ import annotations

import errno
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from tpunb.places.errors import PlaceError
from tpunb.utils import files, owners, records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_Settings = TypeVar("_Settings", bound="Settings")

FILE = "places.toml"
PORT = 8460
"""Default of the first port for the ranks' store on host 0. It and the next four stay below 8471,
where libtpu listens if one process drives a host (SPMD), and below those of torch_xla's ranks."""
_FORMS = {
    # Each program that reads a relative path would start from another folder.
    "folder": (r"(/|~(/|$)).*", "an absolute path or one below ~/"),
    "checkpoints": (r"(/|[a-z0-9]+://).*", "an absolute path or a URL"),
    # ssh would take a name with a dash at the start for an option.
    "hosts": (r"[^\s/-][^\s/]*", "[USER@]HOST, as for ssh"),
    "topology": (r"[1-9]\d*(x[1-9]\d*){1,2}", 'chips along each side, as in "4x4"'),
    "chips_per_host": (r"[148]", "1, 4 or 8"),
}
"""Regular expressions for values of keys, and what they accept."""


@dataclass(frozen=True)
class Settings:
    """Settings of a place."""


@dataclass(frozen=True, kw_only=True)
class SavingSettings(Settings):
    """Settings of places whose runs tpunb tells where to save."""

    checkpoints: str = ""
    """Where `tpunb.save` writes and `tpunb.load` reads: a folder that all hosts share, or a URL."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(SavingSettings):
    """Settings of every place with existing hosts."""

    python: str = "python3"
    """The interpreter on each host."""
    folder: str = "~/.tpunb"
    """The folder on each host for runs and files."""
    files: tuple[str, ...] = ()
    """Files and folders to copy to the hosts, relative to `places.toml` or the working directory:
    paths or patterns; `- PATTERN` leaves out what matches below them."""
    cores: int | None = None
    """Ranks of each host; None: one for each chip, or 4 rehearsal cores without a TPU."""
    port: int = PORT
    ask_above: float | None = None
    """Ask before a run that may cost more dollars. None: never ask."""


@dataclass(frozen=True, kw_only=True)
class SshSettings(HostSettings):
    """`kind = "ssh"`: hosts, named as for ssh."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GcloudSettings(HostSettings):
    """`kind = "gcloud-tpu"`, a TPU VM of one or more hosts, or `"gcloud-mig"`, the VMs of a
    managed instance group.
    """

    name: str
    zone: str
    project: str = ""
    internal_ip: bool = False
    """Connect to the hosts' internal addresses, from a machine in the same network."""
    tunnel: bool = False
    """Connect through Identity-Aware Proxy, for VMs without an external address."""


@dataclass(frozen=True, kw_only=True)
class JobSetSettings(SavingSettings):
    """`kind = "jobset"`: a Kubernetes cluster with TPUs, for `tpunb submit --manifest`."""

    accelerator: Literal["v5e", "v5p", "v6e", "tpu7x"]
    topology: str
    """'4x4': chips along each side."""
    image: str
    """Container image with tpunb, torch, torch_xla or torch_tpu, and the notebook's packages."""
    chips_per_host: int | None = None
    """8 for a host with all chips of `2x4`; None: 4, or 1 for a single chip."""
    queue: str = ""
    """Kueue's LocalQueue; without one the pods start as soon as the cluster has room."""
    service_account: str = ""
    """Kubernetes service account of the pods, for access to a bucket."""

    @property
    def all_chips(self) -> int:
        """Chips of the slice."""
        return math.prod(map(int, self.topology.split("x")))

    @property
    def chips(self) -> int:
        """Chips of each host."""
        return self.chips_per_host or min(self.all_chips, 4)

    @property
    def hosts(self) -> int:
        """Hosts of the slice, each a pod."""
        return max(1, self.all_chips // self.chips)


@dataclass(frozen=True, kw_only=True)
class KaggleSettings(Settings):
    """`kind = "kaggle"`: Kaggle, for `tpunb submit`."""

    accelerator: str = "TpuV5E8"
    """Kaggle's name of the accelerator; "": none, for a rehearsal on the session's processors."""
    session_hours: float = 9.0
    """Hours after which Kaggle ends the session. It has its own limit, too, 9 hours with a TPU."""


KINDS: Mapping[str, type[Settings]] = {
    "ssh": SshSettings,
    "gcloud-tpu": GcloudSettings,
    "gcloud-mig": GcloudSettings,
    "jobset": JobSetSettings,
    "kaggle": KaggleSettings,
}
_TYPES = {str: "a text", tuple[str, ...]: "a list of texts", bool: "true or false"}


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
        return {**asdict(self), "file": str(self.file)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlaceConfig:
        """The inverse of `to_json`. Raises ValueError."""
        try:
            settings = records.build(KINDS[data["kind"]], data["settings"])
            return cls(str(data["name"]), str(data["kind"]), Path(data["file"]), settings)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a place: {error}") from None


def find_place(name: str, folder: Path) -> PlaceConfig:
    """Find the place `name` from a working directory.

    Raises PlaceError if no file describes it, or if its entry is invalid.
    """
    known: set[str] = set()
    for file in (found := _files(folder)):
        places = _read(file)
        if name in places:
            return _parse(file, name, places[name])
        known.update(places)
    if not found:
        raise PlaceError(
            f"there is no {FILE} in {folder} or its parents, nor {_user_file()}. Create one:\n"
            f'[places.{name}]\nkind = "ssh"\nhosts = ["10.0.0.2", "10.0.0.3"]'
        )
    listed, names = ", ".join(map(str, found)), ", ".join(sorted(known)) or "none"
    raise PlaceError(f"{listed}: no place is named {name!r} (places: {names})")


def find_hosts_place(name: str, folder: Path) -> PlaceConfig:
    """Find a place with existing hosts like `find_place`. Raises PlaceError for another kind."""
    place = find_place(name, folder)
    if isinstance(place.settings, HostSettings):
        return place
    more = " --manifest > run.yaml`, which kubectl runs" if place.kind == "jobset" else "`"
    raise PlaceError(
        f'place {name} is of kind "{place.kind}", which takes whole notebooks: '
        f"`tpunb submit NB.ipynb --on {name}{more}"
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
    """The places of a file of this user, who decides where code is sent. Raises PlaceError."""
    try:
        if not owners.is_trusted(file.lstat()):
            raise PermissionError(errno.EPERM, "another user's file")
        data = tomllib.loads(files.read_text(file.resolve()))  # it may be a link of this user
    except OSError as error:
        raise PlaceError(f"{file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlaceError(f"{file} is not valid TOML: {error}") from None
    places = data.pop("places", {})
    if data or not isinstance(places, dict):
        raise PlaceError(f"{file}: only [places.NAME] tables are allowed")
    return places


def _parse(file: Path, name: str, table: object) -> PlaceConfig:
    where = f"{file}: places.{name}"
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(kind, str) or kind not in KINDS:
        kinds = " or ".join(f'"{known}"' for known in KINDS)
        raise PlaceError(f"{where}: write [places.{name}] and below it kind = {kinds}")
    made: Any = KINDS[kind]
    types, values = records.hints(made), {k: v for k, v in table.items() if k != "kind"}
    for key, value in values.items():
        if key not in types:
            keys = f'(keys of kind "{kind}": {", ".join(types)})'
            raise PlaceError(f"{where}.{key} is unknown {keys}")
        form, what = _FORMS.get(key, (".*", ""))
        try:
            values[key] = converted = records.convert(types[key], value)
        except ValueError:
            what = _describe(types[key])
            raise PlaceError(f"{where}.{key} = {value!r}: write {what}") from None
        for each in converted if isinstance(converted, tuple) else (converted,):
            if not re.fullmatch(form, str(each)):
                raise PlaceError(f"{where}.{key} = {each!r}: write {what}")
    for item in fields(made):
        if item.default is MISSING and not values.get(item.name):
            raise PlaceError(f"{where}.{item.name} is missing: {_describe(types[item.name])}")
    return PlaceConfig(name, kind, file, made(**values))


def _describe(hint: Any) -> str:
    """A type for people: 'a text', '"v5e" or "v6e"'."""
    if get_origin(hint) is Literal:
        return " or ".join(f'"{each}"' for each in get_args(hint))
    return _TYPES.get(hint, "a number")
