"""Diagnosis of failed runs: from a log to causes and fixes, by a table of rules."""

from tpunb.diagnostics.failure.engine import diagnose, most_relevant_lines
from tpunb.diagnostics.failure.facts import Facts
from tpunb.runs.result import Diagnosis, Evidence

__all__ = ["Diagnosis", "Evidence", "Facts", "diagnose", "most_relevant_lines"]
