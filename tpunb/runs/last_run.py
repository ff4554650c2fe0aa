"""`tpunb.last_run`: the result of the last run of this kernel.

It is in a module of its own, so that code that sets it need not import the `tpunb` package's API.
In a run, the script sets it to the kernel's value (`tpunb.runs.ended`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpunb.runs.result import RunResult

result: RunResult | None = None
