"""Notebooks for tests of migrations, made of the sources of their cells."""

from __future__ import annotations

from typing import Any

from tpunb.notebook.migrate import Migration, migrate


def notebook(*sources: str) -> dict[str, Any]:
    """A notebook of code cells; 'markdown: text' makes a markdown cell."""
    cells: list[dict[str, Any]] = []
    for index, source in enumerate(sources):
        head, _, text = source.partition(": ")
        if head == "markdown":
            markdown = {"cell_type": "markdown", "id": f"cell-{index}", "metadata": {}}
            cells.append({**markdown, "source": text})
        else:
            output = {"name": "stdout", "output_type": "stream", "text": [f"{index}\n"]}
            cells.append(
                {
                    "cell_type": "code",
                    "execution_count": index,
                    "id": f"cell-{index}",
                    "metadata": {"tags": [f"tag-{index}"]},
                    "outputs": [output],
                    "source": source,
                }
            )
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def sources(made: Migration) -> list[str]:
    """The sources of a migrated notebook's cells."""
    return [cell["source"] for cell in made.notebook["cells"]]


def migrated(*cells: str, train: bool = False) -> list[str]:
    """The sources of cells after a migration; checks that a second one changes nothing."""
    made = migrate(notebook(*cells), train=train)
    assert migrate(made.notebook, train=train).notebook == made.notebook
    assert not migrate(made.notebook, train=train).diff()
    return sources(made)
