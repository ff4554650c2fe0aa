"""matplotlib figures of metrics, one panel for each metric.

Imported when a figure is made: raises MissingPackageError without matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tpunb.utils.errors import MissingPackageError

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingPackageError("matplotlib", "plots", "pip install matplotlib") from error

if TYPE_CHECKING:
    import pandas as pd

ACROSS = 3
"""Panels side by side."""
_SIZE = 3.2, 2.4
"""Inches of one panel."""


class Picture(Figure):
    """A figure that shows itself as a cell's value, whatever matplotlib's backend is.

    matplotlib teaches IPython to show figures once pyplot has chosen its inline backend, which
    nothing here does: it would change the user's own figures.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def panels(runs: Mapping[str, pd.DataFrame]) -> Picture:
    """A panel for each metric, in it a line for each run, by step.

    `runs`: what `RunResult.metrics(reduced=True)` gives, by the name for the legend. A metric
    that was logged without steps is drawn over the seconds since the run's start. Raises
    ValueError if nothing was logged.
    """
    names = list(
        dict.fromkeys(
            name
            for frame in runs.values()
            for name in frame.columns
            if name not in ("step", "time")
        )
    )
    if not names:
        raise ValueError("nothing was logged: tpunb.log(step, loss=loss) in the train cell does it")
    across = min(ACROSS, len(names))
    down = math.ceil(len(names) / across)
    figure = Picture(figsize=(across * _SIZE[0], down * _SIZE[1]), layout="constrained", dpi=120)
    axes = figure.subplots(down, across, squeeze=False).flat
    for name, axis in zip(names, axes, strict=False):
        for label, frame in runs.items():
            if name not in frame:
                continue
            known = frame[frame[name].notna()]
            by = "step" if known["step"].notna().any() else "time"
            known = known[known[by].notna()].sort_values(by)
            axis.plot(
                known[by],
                known[name],
                label=label,
                linewidth=1.2,
                marker="o" if len(known) == 1 else None,
                markersize=3,
            )
            axis.set_xlabel("step" if by == "step" else "seconds")
        axis.set_ylabel(name)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.5)
    for axis in list(figure.axes)[len(names) :]:
        axis.remove()
    if len(runs) > 1:
        figure.axes[0].legend(frameon=False, fontsize="small")
    return figure
