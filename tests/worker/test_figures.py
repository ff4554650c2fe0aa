"""What rank 0 draws in a train cell becomes files and events of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import Driver, Seen
from tpunb.runs.directory import RunDir
from tpunb.runs.events import Figure, Note

IMPORTS = """
import numpy as np, os
import matplotlib.pyplot as plt
from IPython.display import clear_output, display
rank = int(os.environ.get("RANK", -1))
"""


def figures(seen: Seen) -> list[int]:
    """The numbers of the figures in order; each of them is a PNG of rank 0."""
    assert seen.result.state == "succeeded", seen.result.failure
    run = RunDir(seen.result.dir)
    numbers = [event.number for event in seen.events if isinstance(event, Figure)]
    written = sorted(path.relative_to(run.path) for path in run.path.rglob("*.png"))
    assert written == sorted({run.figure(0, each).relative_to(run.path) for each in numbers})
    for number in numbers:
        assert run.figure(0, number).read_bytes().startswith(b"\x89PNG")
    return numbers


def printed(seen: Seen, rank: int) -> str:
    return (RunDir(seen.result.dir).attempt(0, rank) / "stdout.log").read_text()


def test_figures_of_rank_0_are_shown_once_each(driver: Driver) -> None:
    above = "plt.plot([1, 2]); plt.show(); display(plt.figure()); plt.figure()"
    train = """
plt.plot([rank, 1])
plt.show()
plt.figure()
plt.figure()
plt.show()
shown, axes = plt.subplots()
display(shown)
axes.plot([1, 2])
display(shown, "text")
plt.figure().show()
plt.figure()  # still open at the end
print(plt.get_fignums(), plt.get_backend())
"""
    seen = driver.run([IMPORTS, above], train)
    assert figures(seen) == [1, 2, 3, 4, 5, 6, 7]
    for rank in (0, 1):
        text, state = printed(seen, rank).splitlines()
        assert text == "text"  # figures are not printed
        assert state == "[1, 2, 3] module://tpunb.worker.figure_backend"


@pytest.mark.parametrize(
    "options", [{}, {"replicate": "--replicate"}], ids=["forked", "replicated"]
)
def test_the_prelude_displays_nothing(driver: Driver, options: dict[str, Any]) -> None:
    look = """
from IPython.display import HTML
display(1, HTML("<b>x</b>"))
handle = display("first", display_id=True)
handle.update("second")
plt.plot([1, 2])
"""
    seen = driver.run(
        [IMPORTS, look, "print(plt.get_fignums())"], "handle.update('third')", **options
    )
    assert figures(seen) == []
    assert printed(seen, 0) == printed(seen, 1) == "third\n"
    logs = [path.read_text() for path in Path(seen.result.dir).rglob("prelude*.log")]
    assert "[]\n" in logs
    assert set(logs) <= {"[]\n", ""}


def test_nothing_is_imported_to_draw_nothing(driver: Driver) -> None:
    seen = driver.run(["import sys"], "print({'IPython', 'matplotlib'} & {*sys.modules})")
    assert printed(seen, 0) == "set()\n"


def test_pictures_that_are_not_of_matplotlib(driver: Driver) -> None:
    train = """
from PIL import Image
display(Image.new("L", (9, 9)), 5)
display()
"""
    seen = driver.run([IMPORTS], train)
    assert figures(seen) == [1]
    assert printed(seen, 0) == printed(seen, 1) == "5\n\n"


def test_a_loop_that_draws_its_progress(driver: Driver) -> None:
    train = """
for step in range(3):
    clear_output(wait=True)
    plt.plot(range(step))
    plt.show()
    plt.figure()
    plt.show()
"""
    seen = driver.run([IMPORTS], train)
    assert figures(seen) == [1, 2] * 3
    assert printed(seen, 0) == ""


def test_number_and_size_of_figures_are_limited(driver: Driver) -> None:
    train = """
for step in range(22):
    plt.figure(figsize=(0.3, 0.3))
    plt.show()
plt.figure(figsize=(12, 12))
plt.imshow(np.random.rand(1200, 1200))
plt.show()
"""
    seen = driver.run([IMPORTS], train)
    assert figures(seen) == [*range(1, 21), 20, 20]
    notes = [event.text for event in seen.events if isinstance(event, Note)]
    [note] = [text for text in notes if "a figure of" in text]
    assert "is not shown, the limit is 2.0 MB: lower its dpi or size" in note


def test_a_figure_that_cannot_be_drawn_at_the_end_fails_nothing(driver: Driver) -> None:
    seen = driver.run([IMPORTS], "plt.title(r'$\\\\nothing$')")
    assert figures(seen) == []
    errors = (RunDir(seen.result.dir).attempt(0, 0) / "stderr.log").read_text()
    assert "ValueError" in errors


@pytest.mark.parametrize("backend", ["svg", "module://matplotlib_inline.backend_inline"])
def test_another_backend_is_left_alone(driver: Driver, backend: str) -> None:
    chosen = f"import matplotlib\nmatplotlib.use({backend!r})"
    seen = driver.run([chosen, IMPORTS], "plt.figure(); print(plt.get_backend())")
    assert figures(seen) == []
    assert printed(seen, 0) == f"{backend}\n"
