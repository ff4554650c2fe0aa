"""A project with a place of kind "colab", behind the stand-in, and ranks that start at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.drivers.pods import ROOT, TORCHLESS
from tests.fakes import colab
from tests.fakes.colab import FakeColab


class ColabProject:
    """A folder with a `places.toml`, and the account that its sessions are of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "project"
        self.project.mkdir()
        self.colab: FakeColab = colab.install(folder / "bin")
        self.set_place()

    def set_place(self, **settings: object) -> None:
        """Write `places.toml`, with settings besides the accelerator."""
        lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
        text = "\n".join(['[places.colab]\nkind = "colab"\naccelerator = "cpu"', *lines])
        (self.project / "places.toml").write_text(text + "\n")

    def without_torch(self) -> None:
        """In sessions from now on, ranks are plain Python: see `tests.fakes.torchless`."""
        folder = self.folder / "torchless"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(TORCHLESS)
        self.colab.put(PYTHONPATH=f"{folder}:{ROOT}")

    def environment(self) -> dict[str, str]:
        """For who uses the place."""
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return {"PATH": path, "HOME": str(self.folder)}

    def tpunb(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in the project."""
        return subprocess.run(
            [sys.executable, "-m", "tpunb", *words],
            cwd=self.project,
            env={**os.environ, **self.environment()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def notebook(self, train: str, options: str = "") -> None:
        """Write `nb.ipynb`, which has a train cell only: ranks without torch know no prelude."""
        import nbformat
        from nbformat import v4

        cell = v4.new_code_cell(f"%%tpu_train {options}\n{train}")
        nbformat.write(v4.new_notebook(cells=[cell]), str(self.project / "nb.ipynb"))

    def wait_until_released(self, patience: float = 120.0) -> None:
        """No session is left, and no process of one."""
        deadline = time.monotonic() + patience
        while (left := self.colab.sessions) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left


@contextmanager
def colab_project(folder: Path) -> Iterator[ColabProject]:
    """Its sessions are ended with it."""
    made = ColabProject(folder)
    try:
        yield made
    finally:
        made.colab.close()
