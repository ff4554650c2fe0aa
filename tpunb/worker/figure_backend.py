"""matplotlib's backend in the processes of a run, loaded by matplotlib (`tpunb.worker.figures`)."""

from __future__ import annotations

from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from tpunb.worker import figures


class FigureManager(FigureManagerBase):
    """Shows figures in the notebook's cell."""

    def show(self) -> None:
        """`figure.show()`."""
        figures.show(self.canvas.figure)

    @classmethod
    def pyplot_show(cls, *arguments: Any, **options: Any) -> None:
        """`plt.show()`."""
        figures.show_open()


class FigureCanvas(FigureCanvasAgg):
    """Draws as Agg does."""

    manager_class = FigureManager
