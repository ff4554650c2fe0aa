"""matplotlib figures of metrics, with a panel for each metric.

Imported when a figure is made; without matplotlib, the import raises MissingPackageError.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tpunb.utils.errors import MissingPackageError
from tpunb.utils.install_commands import PIP_INSTALL

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingPackageError("matplotlib", "plots", f"{PIP_INSTALL} matplotlib") from error

if TYPE_CHECKING:
    import pandas as pd

ACROSS = 3
"""The number of panels in a row."""
_SIZE = 3.2, 2.4
"""Width and height of a panel in inches."""


class Picture(Figure):
    """A figure that is displayed as a cell's value with any matplotlib backend.

    IPython displays figures only after pyplot has chosen its inline backend. This module does not
    choose it, because that would change the user's own figures.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def panels(runs: Mapping[str, pd.DataFrame], names: Sequence[str] = ()) -> Picture:
    """Draw a panel for each metric with a line for each run, by step.

    `names`: the metrics to draw; by default all.

    `runs`: frames of `RunResult.metrics(reduced=True)`, keyed by the name for the legend. A metric
    that was logged without steps is drawn over the seconds since the run's start. Raises
    ValueError if nothing was logged.
    """
    names = names or list(
        dict.fromkeys(
            name
            for frame in runs.values()
            for name in frame.columns
            if name not in ("step", "time")
        )
    )
    if not names:
        raise ValueError("nothing was logged: call tpunb.log(step, loss=loss) in the train cell")
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
    if len(runs) > 1:  # beside the panels, where no line is
        lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
        beside = figure.axes[across - 1]
        beside.legend(
            handles=[*lines.values()],
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
            fontsize="small",
        )
    return figure
