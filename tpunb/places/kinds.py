"""Which modules know a kind of place. Each is imported when a place of its kind is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tpunb.places.config import find_place
from tpunb.places.place import Place, PlacedRun, place_of
from tpunb.places.target import Kind, PlaceReport, Say, Target
from tpunb.runs import state
from tpunb.runs.directory import RunDir
from tpunb.utils.errors import TpunbError


def find_kind(kind: str) -> Kind:
    """What is to be known of a kind: a key of `config.KINDS`."""
    match kind:
        case "jobset":
            from tpunb.places.gke import KIND
        case "colab":
            from tpunb.places.colab import KIND
        case "kaggle":
            from tpunb.places.kaggle import KIND
        case _:
            from tpunb.places.hosts_target import KIND
    return KIND


def find_target(name: str, cwd: Path, say: Say, cancelled: Callable[[], bool]) -> Target:
    """The place that is called so, once it was asked whether it can take a run.

    `say` takes what it waits for: this may last a minute, and longer with packages to install.

    Raises PlaceError for `places.toml`, other TpunbErrors for a place that cannot take a run, and
    once `cancelled` says so.
    """
    place = find_place(name, cwd)
    return find_kind(place.kind).find_target(place, cwd, say, cancelled)


def inspect_place(name: str, cwd: Path) -> PlaceReport:
    """What `tpunb doctor --on` says of a place. Raises PlaceError."""
    place = find_place(name, cwd)
    return find_kind(place.kind).inspect(place)


def read_run(run: RunDir) -> PlacedRun | None:
    """Where a run is; None for one on this machine. Raises ValueError."""
    place = place_of(run)
    return None if place is None else find_kind(place.kind).run.read(run)


def why_unstoppable(run: RunDir) -> str:
    """Why a run cannot be stopped from here, and what can be done; '' if it can be."""
    try:
        placed = read_run(run)
    except ValueError:
        return ""
    return "" if placed is None else placed.cannot_stop


def refuse_stop(run: RunDir) -> None:
    """Raise TpunbError for an active run that cannot be stopped from here."""
    if state.run_state(run).active and (cannot := why_unstoppable(run)):
        raise TpunbError(f"run {run.id} goes on: {cannot}")


def open_place(run: RunDir) -> Place:
    """The place of a run, with the five calls. Raises TpunbError."""
    try:
        placed = read_run(run)
    except ValueError as error:
        raise TpunbError(f"{run.place} cannot be read: {error}") from None
    if placed is None:
        raise TpunbError(f"run {run.id} was here: all its files are in {run.path}")
    return find_kind(placed.place.kind).open_place(run, placed)
