"""tpunb: train PyTorch models on every core of a TPU, or of this machine, from a notebook.

    %load_ext tpunb
    %tpu_setup
    %%tpu_train          the notebook above, and this cell on every core

In cells: `tpunb.log(step=…, loss=…)`, `tpunb.track(loader)`, `tpunb.save(state, step)` and
`tpunb.load()`; after a run:
`tpunb.last_run`, and to compare several `tpunb.runs()` and `tpunb.plot()`. For a log of any run:
`tpunb.diagnose(text)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tpunb.comparison import plot, runs
    from tpunb.diagnosis import diagnose
    from tpunb.models import RunResult
    from tpunb.scaling import compare
    from tpunb.training.checkpoint import load, save
    from tpunb.training.log import log
    from tpunb.training.track import track

__version__ = "0.1.0"
__all__ = [
    "RunResult",
    "compare",
    "diagnose",
    "last_run",
    "load",
    "log",
    "plot",
    "runs",
    "save",
    "track",
]

last_run: RunResult | None = None
"""The result of the last run of this kernel."""


_PLACES = {
    "RunResult": "models",
    "compare": "scaling",
    "diagnose": "diagnosis",
    "load": "training.checkpoint",
    "log": "training.log",
    "plot": "comparison",
    "runs": "comparison",
    "save": "training.checkpoint",
    "track": "training.track",
}
"""Where a name is. Loaded when it is used: `import tpunb` must feel instant."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tpunb' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpunb.{_PLACES[name]}"), name)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext tpunb`."""
    from tpunb import magics

    magics.load_ipython_extension(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext tpunb`."""
    from tpunb import magics

    magics.unload_ipython_extension(shell)
