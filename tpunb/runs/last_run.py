"""`tpunb.last_run`: the result of the last run of this kernel.

A module of its own, so that what sets it does not import the package's face. In a run it is set by
the script, to what it was in the kernel (`tpunb.runs.ended`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpunb.runs.result import RunResult

result: RunResult | None = None
