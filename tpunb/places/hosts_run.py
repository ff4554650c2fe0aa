"""`HostsRun`: where a run on several hosts was sent."""

from __future__ import annotations

from dataclasses import dataclass

from tpunb.places.place import PlacedRun


@dataclass(frozen=True)
class HostsRun(PlacedRun):
    """A run on hosts that are reached by a transport."""

    hosts: tuple[str, ...]
    """The transport's names of the hosts, in order of node rank."""
    addresses: tuple[str, ...]
    """The addresses at which the hosts reach each other."""
    folders: tuple[str, ...]
    """The run folder on each host."""
    python: str
    """The hosts' interpreter, as a word of a shell."""
    port: int
    """Port of the rendezvous on host 0."""
    root: str
    """The local folder from which files are copied."""
    work: str
    """The hosts' folder to which they are copied."""
    rsync: bool = False
    """Whether rsync is installed on all hosts."""
