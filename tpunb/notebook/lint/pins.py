"""Releases of packages that a notebook's own commands install."""

from __future__ import annotations

import re

from tpunb.notebook.lint.index import NotebookIndex


def pins_older(notebook: NotebookIndex, package: str, release: tuple[int, int]) -> bool:
    """Whether a command of the notebook installs a package from before a release.

    `package` is a regular expression.
    """
    pin = re.compile(rf"(?<![\w-]){package}(?:\[[^\]]*\])?\s*(==|~=|<=?)\s*(\d+)(?:\.(\d+))?")
    for cell in notebook.cells:
        for _, text in cell.commands():
            for sign, major, minor in pin.findall(text):
                found = (int(major), int(minor or 0))
                if found < release or (sign == "<" and found == release):
                    return True
    return False
