"""Scripts that stand in for commands."""

import sys

SHEBANG = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''"""
"""The first lines of a script for this Python, whose path may hold spaces."""
