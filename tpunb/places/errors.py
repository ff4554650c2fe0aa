"""Errors of places."""

from __future__ import annotations

from pathlib import Path

from tpunb.utils.errors import TpunbError


class PlaceError(TpunbError):
    """A place cannot be used as `places.toml` names it.

    `file` is the file that is wrong, `key` the key in it ('places.pod.hosts').
    """

    def __init__(self, reason: str, file: Path | None = None, key: str = "") -> None:
        super().__init__(reason, file, key)
        self.reason = reason
        self.file = file
        self.key = key

    def __str__(self) -> str:
        return self.reason


class HostsError(TpunbError):
    """Hosts of a place differ from what a run needs, or cannot be reached.

    `problems` has what is wrong, by the host's name.
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
        lines = [f"{host}: {problem}" for host, problem in self.problems]
        return "\n".join([f"place {self.place}: {self.then}", *lines])
