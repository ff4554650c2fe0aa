"""From the log of a failed run to causes and fixes, by a table of rules."""

from tpunb.diagnostics.failure.engine import diagnose, key_lines
from tpunb.diagnostics.failure.facts import Facts
from tpunb.runs.result import Diagnosis, Evidence

__all__ = ["Diagnosis", "Evidence", "Facts", "diagnose", "key_lines"]
