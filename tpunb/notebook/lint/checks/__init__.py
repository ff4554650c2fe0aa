"""The rules, by topic. Importing this package fills the table in the order of the docs."""

from tpunb.notebook.lint.checks import (
    cells,
    collectives,
    data,
    environment,
    hardware,
    loops,
    old_names,
    saving,
    shapes,
    starting,
    torchtpu,
    undefined,
)

MODULES = (
    *(cells, collectives, data, environment, hardware, loops, old_names, saving, shapes),
    *(starting, torchtpu, undefined),
)
