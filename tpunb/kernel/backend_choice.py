"""The backend of a notebook's runs, from its cells and what is installed."""

from __future__ import annotations

from collections.abc import Sequence

from tpunb.backends.choice import BackendChoice, NamedBackend, choose, find_installed
from tpunb.notebook.convert.stack import stacks_named
from tpunb.runs.spec import BackendName


def choose_for(asked: BackendName | None, cells: Sequence[tuple[int | None, str]]) -> BackendChoice:
    """Choose the backend for code cells: their numbers, None if they have none, and sources.

    `asked`: what `%tpu_setup --backend` names, if anything.
    """
    named = {
        name: NamedBackend(
            f"cell [{cells[found.cell][0] or ' '}] has `{found.found}`", found.certain
        )
        for name, found in stacks_named([source for _, source in cells]).items()
    }
    return choose(asked, named, find_installed())
