"""Finds a place that runs can be sent to; says what to do with a place of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tpunb.places.config import JobSetSettings, KaggleSettings, PlaceConfig, find_place
from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled, Check, Say
from tpunb.utils.errors import TpunbError
from tpunb.utils.tools import StoppedError

if TYPE_CHECKING:
    from tpunb.places.hosts_target import HostsTarget
    from tpunb.places.inspect_place import PlaceReport


def find_target(name: str, cwd: Path, say: Say, cancelled: Check) -> HostsTarget:
    """Return the place `name`, after checking that it can take a run.

    `say` is called with progress messages: the check may take a minute, and longer if packages are
    installed.

    Raises PlaceError for errors in `places.toml`, other TpunbErrors if the place cannot take a run
    or `cancelled` returns True.
    """
    from tpunb.places.hosts_target import find_hosts

    place = _find_place(name, cwd)
    try:
        target = find_hosts(place, cwd, say, cancelled)
        if not cancelled():
            return target
    except (Cancelled, StoppedError):
        pass
    raise TpunbError("interrupted before the run began: nothing was started")


def inspect_place(name: str, cwd: Path) -> PlaceReport:
    """The report of `tpunb doctor --on`. Raises PlaceError."""
    from tpunb.places.inspect_place import inspect_hosts

    return inspect_hosts(_find_place(name, cwd))


def _find_place(name: str, cwd: Path) -> PlaceConfig:
    place = find_place(name, cwd)
    told = ""
    match place.settings:
        case JobSetSettings():
            told = (
                "a cluster, for which tpunb writes what kubectl runs: `tpunb submit NB.ipynb --on "
                f"{name} --manifest > run.yaml`, then `kubectl apply -f run.yaml` and the `kubectl "
                "logs -f` of its first lines"
            )
        case KaggleSettings():
            told = (
                f"Kaggle, which runs whole notebooks: `tpunb submit NB.ipynb --on {name}` pushes "
                "one, waits for its end and fetches its output"
            )
    if told:
        raise PlaceError(f"place {name} is {told}", place.file, f"places.{name}")
    return place
