"""Why a run failed: a log and how it ended, in; causes and fixes, out."""

from tpunb.diagnose.engine import diagnose
from tpunb.diagnose.finding import Diagnosis, Evidence, Facts
from tpunb.diagnose.telling import telling_lines

__all__ = ["Diagnosis", "Evidence", "Facts", "diagnose", "telling_lines"]
