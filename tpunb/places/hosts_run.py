"""Where a run on hosts is."""

from __future__ import annotations

from dataclasses import dataclass

from tpunb.places.place import PlacedRun


@dataclass(frozen=True)
class HostsRun(PlacedRun):
    """A run on hosts that are reached by a transport."""

    hosts: tuple[str, ...]
    """As the place's transport names them, in order of node rank."""
    addresses: tuple[str, ...]
    """By which they reach each other."""
    folders: tuple[str, ...]
    """The run's folder on each."""
    python: str
    """The interpreter there, as a word of a shell."""
    port: int
    """Of the rendezvous, on host 0."""
    root: str
    """The folder here from which files travel …"""
    work: str
    """… and theirs there."""
    rsync: bool = False
    """Whether all hosts have it."""
