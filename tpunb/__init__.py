"""tpunb: train PyTorch models on every core of a TPU, or of this machine, from a notebook.

    %load_ext tpunb
    %tpu_setup
    %%tpu_train          runs the notebook above, then this cell on every core

In cells: `tpunb.log(step, loss=loss)`, `tpunb.track(loader)`, `tpunb.save(state, step)`,
`tpunb.load()` and the helpers of `tpunb.training`. To start a run without a magic, even in a loop:
`tpunb.launch(train, args=(0.1,))`. After a run: `tpunb.last_run`; to compare
several: `tpunb.runs()`, `tpunb.plot()` and `tpunb.scaling()`. For the log of any run:
`tpunb.diagnose(text)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpunb.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tpunb.diagnostics.failure import diagnose
    from tpunb.kernel.launch import launch
    from tpunb.kernel.scaling import scaling
    from tpunb.runs.callbacks import on_log
    from tpunb.runs.compare import plot, runs
    from tpunb.runs.result import RunResult
    from tpunb.training.checkpoint.api import load, save
    from tpunb.training.log import log
    from tpunb.training.track import track

    last_run: RunResult | None
    """The result of the last run in this kernel."""

__all__ = [
    "RunResult",
    "diagnose",
    "last_run",
    "launch",
    "load",
    "log",
    "on_log",
    "plot",
    "runs",
    "save",
    "scaling",
    "track",
]

_MODULES = {
    "RunResult": "runs.result",
    "diagnose": "diagnostics.failure",
    "launch": "kernel.launch",
    "load": "training.checkpoint.api",
    "log": "training.log",
    "on_log": "runs.callbacks",
    "plot": "runs.compare",
    "runs": "runs.compare",
    "save": "training.checkpoint.api",
    "scaling": "kernel.scaling",
    "track": "training.track",
}
"""Module of each name, imported on first use so that `import tpunb` stays fast."""

_PACKAGES = ("errors", "training")
"""The other public modules."""


def __getattr__(name: str) -> Any:
    if name == "last_run":  # changes with each run, so it is not cached
        return importlib.import_module("tpunb.runs.last_run").result
    if name in _PACKAGES:
        return importlib.import_module(f"tpunb.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'tpunb' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpunb.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext tpunb`."""
    from tpunb.kernel import magics

    magics.load_ipython_extension(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext tpunb`."""
    from tpunb.kernel import magics

    magics.unload_ipython_extension(shell)
