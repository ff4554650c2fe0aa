"""Finds the module for a kind of place. Each is imported when a place of its kind is used."""

from __future__ import annotations

from pathlib import Path

from tpunb.places.config import JobSetSettings, PlaceConfig, find_place
from tpunb.places.errors import PlaceError
from tpunb.places.place import Cancelled, Check, Place, PlacedRun, Say, place_of
from tpunb.places.target import PlaceKind, PlaceReport, PlaceTarget
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.utils.errors import TpunbError
from tpunb.utils.tools import StoppedError


def find_kind(kind: str) -> PlaceKind:
    """The functions of a kind of place that runs can be sent to."""
    match kind:
        case "kaggle":
            from tpunb.places.kaggle import KIND
        case _:
            from tpunb.places.hosts_target import KIND
    return KIND


def find_target(name: str, cwd: Path, say: Say, cancelled: Check) -> PlaceTarget:
    """Return the place `name`, after checking that it can take a run.

    `say` is called with progress messages: the check may take a minute, and longer if packages are
    installed.

    Raises PlaceError for errors in `places.toml`, other TpunbErrors if the place cannot take a run
    or `cancelled` returns True.
    """
    place = _find_place(name, cwd)
    try:
        target = find_kind(place.kind).find_target(place, cwd, say, cancelled)
        if not cancelled():
            return target
    except (Cancelled, StoppedError):
        pass
    raise TpunbError("interrupted before the run began: nothing was started")


def inspect_place(name: str, cwd: Path) -> PlaceReport:
    """The report of `tpunb doctor --on`. Raises PlaceError."""
    place = _find_place(name, cwd)
    return find_kind(place.kind).inspect(place)


def _find_place(name: str, cwd: Path) -> PlaceConfig:
    place = find_place(name, cwd)
    if isinstance(place.settings, JobSetSettings):
        raise PlaceError(
            f"place {name} is a cluster, for which tpunb writes what kubectl runs: "
            f"`tpunb submit NB.ipynb --on {name} --manifest > run.yaml`, then `kubectl apply -f "
            "run.yaml` and the `kubectl logs -f` of its first lines",
            place.file,
            f"places.{name}",
        )
    return place


def read_run(run: RunDir) -> PlacedRun | None:
    """Read where a run was sent; None for a run on this machine. Raises ValueError."""
    place = place_of(run)
    return None if place is None else find_kind(place.kind).run.read(run)


def reason_not_stoppable(run: RunDir) -> str:
    """Why a run cannot be stopped from here, and the alternative; '' if it can be stopped."""
    try:
        placed = read_run(run)
    except ValueError:
        return ""
    return "" if placed is None else placed.cannot_stop


def refuse_stop(run: RunDir) -> None:
    """Raise TpunbError for an active run that cannot be stopped from here."""
    if state.run_state(run).active and (cannot := reason_not_stoppable(run)):
        raise TpunbError(f"run {run.id} is still running: {cannot}")


def open_place(run: RunDir) -> Place:
    """The `Place` of a run. Raises TpunbError."""
    try:
        placed = read_run(run)
    except ValueError as error:
        raise TpunbError(f"{run.place} cannot be read: {error}") from None
    if placed is None:
        raise TpunbError(f"run {run.id} ran on this machine: all its files are in {run.path}")
    return find_kind(placed.place.kind).place(run, placed)
