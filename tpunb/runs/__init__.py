"""A run on disk: its spec, events, state, metrics, logs and result.

`tpunb.runs` is this package and `tpunb.runs()` lists runs, so the package is callable.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


class _CallablePackage(ModuleType):
    def __call__(self, folder: Path | str | None = None) -> pd.DataFrame:
        """See `tpunb.runs.compare.runs`."""
        from tpunb.runs import compare

        return compare.runs(folder)


sys.modules[__name__].__class__ = _CallablePackage
