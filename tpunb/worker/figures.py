"""What rank 0 draws in the train cell becomes files of the run, which the notebook's cell displays.

`plt.show()` shows all open figures and closes them, as in a notebook, and so does the end of the
cell (`figure_backend`). `display` shows figures, and objects with `_repr_png_` such as PIL's, and
prints anything else. Other ranks draw nothing. The prelude, whose cells have displayed their output
in the notebook, neither draws nor displays anything.

Replaces `display` and `clear_output` in `IPython.display`, and chooses matplotlib's backend with
its public `use`. Checked on IPython 7.34 to 9.18 and matplotlib 3.7 to 3.11.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType
from typing import Any
from weakref import WeakSet

from tpunb.runs.directory import RunDir
from tpunb.runs.events import Figure, Note
from tpunb.utils import files
from tpunb.utils.patching import Replacements
from tpunb.utils.text import size

MOST = 20
"""Maximum number of figures of a run; each further one replaces the last."""
LARGEST = 2_000_000
"""Maximum bytes of a figure: it becomes part of the notebook."""
BACKEND = "tpunb.worker.figure_backend"


class Drawing:
    """The figures of the rank that draws."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self.count = 0
        """How many figures are shown; 0 again after `clear_output`."""
        self.displayed: WeakSet[Any] = WeakSet()
        """Figures that the cell has displayed itself."""

    def show(self, png: bytes) -> None:
        """Write a figure to the run folder and announce it."""
        number = min(self.count + 1, MOST)
        with suppress(OSError):  # a full disk: the training is worth more
            if len(png) > LARGEST:
                self._run.emit(
                    Note(
                        f"a figure of {size(len(png))} is not shown, the limit is "
                        f"{size(LARGEST)}: lower its dpi or size"
                    )
                )
                return
            files.atomic_write(self._run.figure(self._attempt, number), png)
            self._run.emit(Figure(self._attempt, number))
            self.count = number


_drawing: Drawing | None = None
"""In rank 0, from the beginning of the train cell."""
_in_train_cell = False


def follow_figures() -> None:
    """In a process that runs cells: replace what draws, now or as soon as it is imported."""
    Replacements({"matplotlib": _choose_backend, "IPython.display": _replace}).begin()


def begin(run: RunDir, attempt: int, rank: int) -> None:
    """Begin the train cell: rank 0 draws from now on."""
    global _drawing, _in_train_cell
    _in_train_cell = True
    _drawing = Drawing(run, attempt) if rank == 0 else None


def finish() -> None:
    """End the train cell: show the figures that are still open, as a notebook does.

    A figure that cannot be drawn is reported on standard error.
    """
    try:
        show_open(again=False)
    except Exception:
        traceback.print_exc()


def show_open(*, again: bool = True) -> None:
    """Show all open figures of pyplot and close them; `again`: also those displayed before."""
    if (pyplot := _pyplot()) is not None:
        if _drawing is not None:
            for figure in map(pyplot.figure, pyplot.get_fignums()):
                if again or figure not in _drawing.displayed:
                    show(figure)
        close_open()


def show(figure: Any) -> None:
    """Show a figure of matplotlib. Raises what its drawing raises."""
    if _drawing is not None:
        file = io.BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight")
        _drawing.show(file.getvalue())
        _drawing.displayed.add(figure)


def close_open() -> None:
    """Close all open figures of pyplot, as a notebook does at the end of a cell."""
    if (pyplot := _pyplot()) is not None:
        pyplot.close("all")


def _pyplot() -> Any:
    """pyplot, once it has opened a figure with this backend; None before."""
    return sys.modules.get("matplotlib.pyplot") if BACKEND in sys.modules else None


def _choose_backend(matplotlib: Any) -> None:
    if os.environ.get("MPLBACKEND", "agg").lower() == "agg":
        matplotlib.use(f"module://{BACKEND}")


def _replace(module: ModuleType) -> None:
    """Replace `display`, also in its own module, whose `DisplayHandle.update` calls it."""
    names: Any = module
    defining: Any = sys.modules[names.display.__module__]
    original = names.display

    def display(*objects: Any, display_id: Any = None, **options: Any) -> Any:
        if _in_train_cell:
            others = [each for each in objects if not _show_picture(each)]
            if others or not objects:
                original(*others, **options)
        if not display_id:
            return None
        return names.DisplayHandle(None if display_id is True else display_id)

    names.display = defining.display = display
    names.clear_output = _clear_output


def _show_picture(value: Any) -> bool:
    """Show a picture in the rank that draws; False if the value is none."""
    figure = sys.modules.get("matplotlib.figure")
    if figure is not None and isinstance(value, figure.Figure):
        show(value)
        return True
    draw = getattr(type(value), "_repr_png_", None)
    if draw is None or not isinstance(png := draw(value), bytes):
        return False
    if _drawing is not None:
        _drawing.show(png)
    return True


def _clear_output(wait: bool = False) -> None:
    """Have the next figure replace the first one: a loop that draws its progress shows one."""
    if _drawing is not None:
        _drawing.count = 0
