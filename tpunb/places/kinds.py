"""Finds the place of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tpunb.places.hosts_target import find_hosts
from tpunb.places.place import HostsRun, place_of
from tpunb.runs.directory import RunDir
from tpunb.utils.errors import TpunbError

if TYPE_CHECKING:
    from tpunb.places.hosts import HostsPlace


find_target = find_hosts


def open_place(run: RunDir) -> HostsPlace:
    """The place of a run. Raises TpunbError."""
    from tpunb.places.hosts import HostsPlace

    if place_of(run) is None:
        raise TpunbError(f"run {run.id} ran on this machine: all its files are in {run.path}")
    try:
        return HostsPlace(run, HostsRun.read(run))
    except ValueError as error:
        raise TpunbError(f"{run.place} cannot be read: {error}") from None
