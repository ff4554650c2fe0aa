"""Errors of places."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpunb.utils.errors import TpunbError
from tpunb.utils.text import MOST_HOSTS


class PlaceError(TpunbError):
    """A place cannot be used as `places.toml` describes it."""


class HostsError(TpunbError):
    """Hosts of a place differ from what a run needs, or cannot be reached.

    `problems`: pairs of a host's name and its problem.
    """

    def __init__(
        self,
        place: str,
        problems: tuple[tuple[str, str], ...],
        then: str = "nothing was started",
    ) -> None:
        super().__init__(place, problems, then)
        self.place = place
        self.problems = problems
        self.then = then

    def __str__(self) -> str:
        return "\n".join([f"place {self.place}: {self.then}", *by_host(self.problems)])


def by_host(said: Iterable[tuple[str, str]]) -> list[str]:
    """Group messages: 'h0, h1: message', once for all hosts with the same message."""
    hosts: dict[str, list[str]] = {}
    for host, what in said:
        hosts.setdefault(what, []).append(host)
    return [f"{list_hosts(names)}: {what}" for what, names in hosts.items()]


def list_hosts(names: Sequence[str]) -> str:
    """'h0, h1', or 'h0, … and 5 more' for many hosts."""
    more = len(names) - MOST_HOSTS
    listed = ", ".join(names[:MOST_HOSTS])
    return f"{listed} and {more} more" if more > 0 else listed
