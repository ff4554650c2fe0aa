"""Kaggle's stand-in with somebody's login, for processes of tests or for the test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.drivers.places import write_places
from tests.fakes.kaggle_kernels import FakeKaggleKernels

KEY = "s3cr3t-key-of-somebody"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


class KaggleProject:
    """A project with a place `kaggle`, and the stand-in that it leads to."""

    def __init__(self, service: FakeKaggleKernels, folder: Path) -> None:
        self.service = service
        self.home = folder / "home"
        self.home.mkdir()
        self.folder = folder / "project"
        self.folder.mkdir()
        self._torchless = folder / "torchless"

    def set_place(self, **values: Any) -> None:
        """Write `places.toml`."""
        write_places(self.folder, kaggle={"kind": "kaggle", **values})

    def login(self) -> dict[str, str]:
        """Variables of a process: whose Kaggle is this one, and its login."""
        return {
            **self.service.environ,
            "HOME": str(self.home),
            "KAGGLE_USERNAME": self.service.username,
            "KAGGLE_KEY": self.service.key,
        }

    def removed(self) -> list[str]:
        """Variables that such a process must not have."""
        names = [*_PROXIES, *map(str.upper, _PROXIES), "XDG_CONFIG_HOME"]
        return [*names, *(name for name in os.environ if name.startswith("KAGGLE"))]

    def environment(self) -> dict[str, str]:
        """All variables of such a process."""
        removed = self.removed()
        return {k: v for k, v in os.environ.items() if k not in removed} | self.login()


@contextmanager
def kaggle_project(folder: Path, **place: Any) -> Iterator[KaggleProject]:
    """The stand-in, and a project whose place `kaggle` is there."""
    with FakeKaggleKernels(folder / "sessions", username="somebody", key=KEY) as service:
        project = KaggleProject(service, folder)
        project.set_place(**place)
        yield project
