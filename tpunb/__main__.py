"""`python -m tpunb` is the same as the command `tpunb`."""

import sys

from tpunb.cli import main

sys.exit(main())
