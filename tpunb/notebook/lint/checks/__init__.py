"""The rules, by topic. Importing this package fills the table in the order of the docs."""

from tpunb.notebook.lint.checks import (
    cells,
    collectives,
    data,
    environment,
    hardware,
    loops,
    modules,
    old_names,
    saving,
    shapes,
    spmd,
    starting,
    undefined,
)

__all__ = [
    "cells",
    "collectives",
    "data",
    "environment",
    "hardware",
    "loops",
    "modules",
    "old_names",
    "saving",
    "shapes",
    "spmd",
    "starting",
    "undefined",
]
