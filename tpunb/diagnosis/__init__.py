"""Why a run failed: a log and how it ended, in; causes and fixes, out."""

from tpunb.diagnosis.engine import diagnose
from tpunb.diagnosis.finding import Diagnosis, Evidence, Facts
from tpunb.diagnosis.telling import telling_lines

__all__ = ["Diagnosis", "Evidence", "Facts", "diagnose", "telling_lines"]
