"""Colab: a kernel and a page that speak its protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.kernel import PATIENCE
from tests.fakes.front_ends import colab
from tests.fakes.front_ends.colab import Page
from tests.notebook.capture.fronts import LOAD, TRAIN, kernel, started, written
from tpunb.notebook.capture.sources.colab import from_colab

FAKE = colab.__name__


def cell(id: str, *lines: str, kind: str = "code") -> dict[str, Any]:
    """As Colab writes it: the id in the metadata, the source as a list of lines."""
    extra = {"outputs": [{"output_type": "stream"}], "execution_count": 3} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {"id": id}, "source": list(lines), **extra}


def notebook(*cells: dict[str, Any]) -> dict[str, Any]:
    metadata = {"colab": {"name": "Digits on TPU.ipynb", "provenance": []}}
    return {"nbformat": 4, "nbformat_minor": 0, "metadata": metadata, "cells": list(cells)}


@pytest.fixture
def page(starts_processes: None, tmp_path: Path) -> Iterator[Page]:
    with started(tmp_path, FAKE) as client:
        yield Page(client, {})


def run(page: Page, source: str, cell: str) -> None:
    reply = page.execute(source, cell)
    assert reply["status"] == "ok", reply


def test_the_page_is_asked_for_the_notebook(page: Page, tmp_path: Path) -> None:
    page.notebook = notebook(
        cell("t0", "# Digits", kind="markdown"),
        cell("a", "rate = 1\n", "steps = 2"),
        cell("n", "never = 1"),
        cell("c", LOAD),
        cell("b", "def loop(rate): ..."),
        cell("t", *TRAIN.splitlines(keepends=True)),
    )
    run(page, "rate = 1\nsteps = 2", "a")
    run(page, LOAD, "c")
    run(page, "first = 1", "b")
    run(page, "def loop(rate): ...", "b")
    run(page, TRAIN, "t")
    found = written(tmp_path)
    assert [(cell["source"], cell["number"], cell["id"]) for cell in found["cells"]] == [
        ("# Digits", None, "t0"),
        ("rate = 1\nsteps = 2", 1, "a"),
        (LOAD, 2, "c"),
        ("def loop(rate): ...", 4, "b"),
        (TRAIN, 5, "t"),
    ]
    assert (found["origin"], found["name"]) == ("the page of Colab", "Digits on TPU")
    assert found["path"] is None
    assert found["notes"] == ["never ran in this kernel, so left out: cell [ ] (never = 1)"]
    assert all(cell.get("outputs", []) == [] for cell in found["content"]["cells"])
    assert found["content"]["cells"][2]["source"] == ["never = 1"]

    # Edited on the page and not run since; and one that ran is deleted.
    run(page, "later = 1", "l")
    page.notebook["cells"][1]["source"] = ["rate = 5"]
    run(page, "rate = 3", "a")
    page.notebook["cells"][4]["source"] = ["%%time\n", "def loop(rate): return 1"]
    run(page, TRAIN, "t")
    found = written(tmp_path)
    assert [cell["source"] for cell in found["cells"]][1] == "rate = 3"
    assert [(cell["source"], why) for cell, why in found["left_out"]] == [
        ("never = 1", "it never ran in this kernel"),
        ("later = 1", "it was deleted"),
    ]
    assert found["notes"][1:] == [
        "ran and deleted since, so left out: cell [6]",
        "cells [7], [4] were edited after they ran; the versions you ran are used",
    ]


def test_a_page_that_does_not_answer(page: Page, tmp_path: Path) -> None:
    run(page, LOAD, "a")
    answers: list[tuple[dict[str, Any] | None, str]] = [
        (None, "Colab did not send the notebook within 0.2 s (is its page open?)"),
        ({"error": "no access"}, "Colab did not return the notebook: no access"),
        ({"data": {}}, "Colab sent no notebook"),
        ({"data": {"ipynb": {"nbformat": 4}}}, "what the page of Colab sent is JSON but not"),
    ]
    for answer, words in answers:
        page.answer = answer
        patience = 0.2 if answer is None else PATIENCE  # a busy page is no closed one
        run(page, f"from tpunb.notebook.capture.sources import colab; colab.WAIT = {patience}", "b")
        run(page, TRAIN, "t")
        found = written(tmp_path)
        assert [cell["source"] for cell in found["cells"]][::2] == [LOAD, TRAIN]
        assert found["origin"] == "executed cells"
        assert found["notes"][0].startswith(f"only the executed cells are used: {words}")


def test_other_kernels_are_not_colab() -> None:
    assert from_colab(kernel()) is None
