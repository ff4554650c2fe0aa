"""The notebook that the user names."""

from __future__ import annotations

from pathlib import Path

from tpunb.errors import NotebookNotFoundError
from tpunb.notebook.sources.base import Found, Kernel


class Option:
    """`%tpu_setup --notebook PATH`."""

    origin = "%tpu_setup --notebook"

    def find(self, kernel: Kernel) -> Found | None:
        return _file(kernel.notebook, self.origin)


class Variable:
    """The environment variable TPUNB_NOTEBOOK."""

    origin = "TPUNB_NOTEBOOK"

    def find(self, kernel: Kernel) -> Found | None:
        return _file(kernel.environ.get("TPUNB_NOTEBOOK"), self.origin)


def _file(name: str | None, origin: str) -> Found | None:
    if not name:
        return None
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise NotebookNotFoundError(name, origin)
    return Found(origin, path)
