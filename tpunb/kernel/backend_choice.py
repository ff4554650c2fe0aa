"""The backend of a notebook's runs, from its cells and what is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpunb.backends.choice import BackendChoice, NamedBackend, choose, find_installed
from tpunb.notebook.convert.stack import names_cpu_only, stacks_named
from tpunb.runs.spec import BackendName


def choose_for(
    asked: BackendName | None,
    cells: Sequence[tuple[int | None, str]],
    run: Sequence[str] | None = None,
) -> BackendChoice:
    """Choose the backend for code cells, in order: their numbers, None if they have not run, and
    sources.

    `asked`: what `%tpu_setup --backend` names, if anything. `run`: the sources without those of
    other train cells, by default all: whether the code asks for the CPU.
    """
    named = {}
    for name, found in stacks_named([source for _, source in cells]).items():
        number = cells[found.cell][0]
        where = f"cell [{number}]" if number else f"code cell {found.cell + 1} (not run yet)"
        named[name] = NamedBackend(f"{where} has `{found.found}`", found.certain)
    chosen = choose(asked, named, find_installed())
    run = [source for _, source in cells] if run is None else run
    return replace(chosen, cpu=names_cpu_only(run))
