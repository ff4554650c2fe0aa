"""Why a run failed: a log and how it ended, in; causes and fixes, out."""
