"""The rules, by topic. Importing this package fills the table in the order of the docs."""

from tpunb.notebook.lint.checks import averaging, batches, cell_names, collectives, effects, loops

MODULES = (cell_names, collectives, averaging, batches, loops, effects)
